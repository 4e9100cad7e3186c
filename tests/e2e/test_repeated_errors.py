"""Errors that come again at the same step end a run that may fail any number of times."""

from __future__ import annotations

import dataclasses
import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

import polytrain
from polytrain import (
    Checkpoint,
    CheckpointConfig,
    FailureConfig,
    FailureKind,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
    make_trainer,
)
from polytrain.testing.processes import eventually


def crashes() -> None:
    polytrain.report({"step": 1})
    if polytrain.get_context().get_world_rank() == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    signal.pause()


def exits() -> None:
    polytrain.report({"step": 1})
    if polytrain.get_context().get_world_rank() == 1:
        os._exit(3)
    signal.pause()


def has_wrong_shapes() -> None:
    """On one rank, behind a barrier; the other one loses its connection."""
    import torch
    import torch.distributed as dist

    polytrain.report({"step": 1})
    dist.barrier()
    if dist.get_rank() == 1:
        torch.ones(2, 3) @ torch.ones(4, 1)
    dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize(
    ("function", "kind", "message"),
    [
        (crashes, FailureKind.WORKER_LOST, "SIGSEGV"),
        (exits, FailureKind.WORKER_LOST, "exited with code 3"),
        (has_wrong_shapes, FailureKind.USER_ERROR, "shapes cannot be multiplied"),
    ],
)
def test_the_second_time_is_the_last(
    function: Callable[[], None], kind: FailureKind, message: str, quiet: RunConfig
) -> None:
    trainer = make_trainer(
        "torch",
        function,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=dataclasses.replace(quiet, failure_config=FailureConfig(max_failures=-1)),
    )
    with pytest.raises(TrainingFailedError, match="same error at step 1") as failed:
        trainer.fit()
    [cause, *_] = failed.value.failures
    assert (cause.kind, cause.rank) == (kind, 1)
    assert message in cause.message
    assert failed.value.result.restarts == 1


def fails_after_each_step(config: dict[str, str]) -> None:
    context, done = polytrain.get_context(), 0
    if (checkpoint := polytrain.get_checkpoint()) is not None:
        done = int(Path(checkpoint.path, "0").read_text())
    if done == 3:
        return
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, str(context.get_world_rank())).write_text(str(done + 1))
        polytrain.report({"done": done}, checkpoint=Checkpoint.from_directory(directory))
    staged = Path(config["marks"], str(done))
    if context.get_world_rank() == 1:
        assert eventually(staged.exists)
        raise OSError("again")
    staged.touch()
    signal.pause()


def test_what_all_ranks_have_staged_is_committed_before_an_error_is_judged(
    quiet: RunConfig, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The same error each time, and yet the run gets on."""
    result = make_trainer(
        "reference",
        fails_after_each_step,
        train_loop_config={"marks": str(tmp_path_factory.mktemp("marks"))},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=dataclasses.replace(
            quiet,
            failure_config=FailureConfig(max_failures=-1),
            checkpoint_config=CheckpointConfig(written_by="every_rank"),
        ),
    ).fit()
    assert result.restarts == 3
    assert [metrics["done"] for metrics in result.history] == [0, 1, 2]
