"""What trainers print and log reaches the user, with the rank in front."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

import polytrain
from polytrain import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError, make_trainer


def talk() -> None:
    import logging

    rank = polytrain.get_context().get_world_rank()
    print(f"printed by {rank}")
    logging.warning("logged by %d", rank)
    print("no newline", end="")


def test_print_and_logging(quiet: RunConfig, capfd: pytest.CaptureFixture[str]) -> None:
    result = make_trainer(
        "reference", talk, scaling_config=ScalingConfig(num_workers=2), run_config=quiet
    ).fit()
    output, errors = capfd.readouterr()
    for rank in (0, 1):
        assert f"(rank {rank}) printed by {rank}\n" in output
        assert f"(rank {rank}) no newline\n" in output
        assert f"(rank {rank}) WARNING:root:logged by {rank}\n" in errors
        log = (Path(result.path) / "logs" / f"rank_{rank}.log").read_text()
        assert f"printed by {rank}" in log
        assert f"logged by {rank}" in log


def lose_a_peer() -> None:
    import os
    import signal

    context = polytrain.get_context()
    if context.get_attempt() == 0 and context.get_world_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    print(f"attempt {context.get_attempt()}")


def test_later_attempts_are_heard(quiet: RunConfig, capfd: pytest.CaptureFixture[str]) -> None:
    make_trainer(
        "reference",
        lose_a_peer,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=dataclasses.replace(quiet, failure_config=FailureConfig(max_failures=1)),
    ).fit()
    output, _ = capfd.readouterr()
    assert output.count("attempt 1") == 2


def complain_and_fail() -> None:
    import sys

    rank = polytrain.get_context().get_world_rank()
    if rank == 1:
        print("the disk of rank 1 is full", file=sys.stderr, end="")
        raise RuntimeError("see above")
    import signal

    signal.pause()


def test_last_words_before_a_failure_are_heard(
    quiet: RunConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    """What a rank writes just before it raises may be the only reason there is."""
    with pytest.raises(TrainingFailedError, match="see above"):
        make_trainer(
            "reference",
            complain_and_fail,
            scaling_config=ScalingConfig(num_workers=2),
            run_config=quiet,
        ).fit()
    assert "(rank 1) the disk of rank 1 is full" in capfd.readouterr().err
