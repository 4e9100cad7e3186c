"""What trainers print and log reaches the user, with the rank in front."""

from __future__ import annotations

import dataclasses
import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

import polytrain
from polytrain import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError, make_trainer
from polytrain.workers.driver.inline_group import InlineGroup


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


PIPED = """
import sys
from polytrain import RunConfig, ScalingConfig, make_trainer

def talk():
    import polytrain
    for number in range(2000):
        print(f"line {number} é")
    polytrain.report({"lines": 2000})

result = make_trainer(
    "reference",
    talk,
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(storage_path=sys.argv[1]),
).fit()
print("finished:", result.finished, result.metrics, file=sys.stderr)
"""


def test_a_run_ends_well_though_nobody_reads_what_it_writes(tmp_path: Path) -> None:
    """`python train.py | head -1`, where the terminal knows ASCII alone."""
    with subprocess.Popen(
        [sys.executable, "-c", PIPED, str(tmp_path / "runs")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() in ("(rank 0) line 0 \\xe9\n", "(rank 1) line 0 \\xe9\n")
        process.stdout.close()
        errors = process.stderr.read()
    assert "finished: True {'lines': 2000}" in errors
    assert "storage" not in errors
    logs = [log.read_text(encoding="utf-8") for log in tmp_path.glob("runs/*/logs/rank_*.log")]
    assert [log.count("é") for log in logs] == [2000, 2000]


def test_what_is_not_the_storages_error_is_not_said_to_be(
    quiet: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def place(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(InlineGroup, "place", place)
    with pytest.raises(OSError, match="Too many open files"):
        make_trainer(
            "reference", talk, scaling_config=ScalingConfig(num_workers=0), run_config=quiet
        ).fit()


def flood(config: dict[str, int]) -> None:
    import os
    import sys

    line = b"x" * 1023 + b"\n"
    for _ in range(config["megabytes"]):
        os.write(1, line * 1024)
    print("after the flood", file=sys.stderr)
    polytrain.report({"megabytes": config["megabytes"]})


def test_a_rank_that_floods_its_output_keeps_its_run(
    quiet: RunConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    result = make_trainer(
        "reference",
        flood,
        train_loop_config={"megabytes": 200},
        scaling_config=ScalingConfig(num_workers=1),
        run_config=quiet,
    ).fit()
    assert result.metrics == {"megabytes": 200}
    log = Path(result.path, "logs", "rank_0.log").read_text()
    assert 8_000_000 < len(log) < 60_000_000
    assert "of what this process has written is left out" in log
    assert "after the flood" in log


TWO_LANGUAGES = """
import sys
from polytrain import RunConfig, ScalingConfig, make_trainer

def talk():
    import os, sys
    for number in range(0, 400, 4):
        print(f"line {number}")
        print(f"line {number + 1}", file=sys.stderr)
        os.write(1, f"line {number + 2}\\n".encode())  # as a C library writes
        os.write(2, f"line {number + 3}\\n".encode())

make_trainer(
    "reference",
    talk,
    scaling_config=ScalingConfig(num_workers=1),
    run_config=RunConfig(name="run", storage_path=sys.argv[1], progress=False),
).fit()
"""


def test_both_streams_in_one_place_are_in_the_order_in_which_a_rank_wrote(tmp_path: Path) -> None:
    shown = subprocess.run(
        [sys.executable, "-c", TWO_LANGUAGES, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
    ).stdout
    lines = [f"line {number}" for number in range(400)]
    assert [line for line in shown.splitlines() if "line" in line] == [
        f"(rank 0) {line}" for line in lines
    ]
    assert (tmp_path / "run/logs/rank_0.log").read_text().splitlines() == lines
