"""What is lost comes back: trainers, agents, zygotes; and what was committed is kept."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import psutil
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
from polytrain.testing import Fault
from polytrain.testing.contract import kit_table
from polytrain.testing.functions import STEPS, count_steps
from polytrain.testing.processes import title
from polytrain_plugins import hookimpl


class KillOnReport:
    """An observer that kills one process of the run, once, when rank 0 reports its second step."""

    def __init__(self, title: str) -> None:
        self._title = title
        self.victim: psutil.Process | None = None

    @hookimpl
    def polytrain_reported(self, report: Any) -> None:
        if report.step == 2 and self.victim is None:
            mine = psutil.Process().children(recursive=True)
            named = (each for each in mine if self._title in title(each))
            # A zygote that waits for the next run has no worker processes; nor has an agent.
            self.victim = max(named, key=lambda each: len(each.children()))
            self.victim.send_signal(signal.SIGKILL)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "title",
    [
        "polytrain.workers.processes.zygote",
        # In `make test`, `test_elastic` has agents that are killed.
        pytest.param("ray::RayHost", marks=[pytest.mark.on_ray, pytest.mark.only_in_sweep]),
    ],
)
def test_lost_agent_and_lost_zygote_are_replaced(quiet: RunConfig, title: str) -> None:
    killer = KillOnReport(title)
    result = make_trainer(
        "reference",
        wait_after_two_steps,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=dataclasses.replace(
            quiet, failure_config=FailureConfig(max_failures=1), observers=(killer,)
        ),
    ).fit()
    assert killer.victim is not None
    assert result.restarts == 1
    assert result.metrics == {"step": 3}


def wait_after_two_steps() -> None:
    """The first attempt waits for its end; the second gets through."""
    import signal

    polytrain.report({"step": 1})
    polytrain.report({"step": 2})
    if polytrain.get_context().get_attempt() == 0:
        signal.pause()
    polytrain.report({"step": 3})


def test_failures_beyond_the_limit_end_the_run(quiet: RunConfig) -> None:
    with pytest.raises(TrainingFailedError, match="killed by SIGKILL") as caught:
        make_trainer(
            "reference",
            kill_always,
            scaling_config=ScalingConfig(num_workers=2),
            run_config=dataclasses.replace(quiet, failure_config=FailureConfig(max_failures=2)),
        ).fit()
    result = caught.value.result
    assert result is not None
    assert result.restarts == 2
    assert "failure 3 of max_failures=2" in caught.value.reason


def kill_always() -> None:
    if polytrain.get_context().get_world_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def test_journal_tells_the_story(quiet: RunConfig) -> None:
    result = make_trainer(
        "reference",
        count_steps,
        train_loop_config={"fault": Fault(rank=0, at_step=1)},
        datasets={"train": kit_table()},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=dataclasses.replace(quiet, failure_config=FailureConfig(max_failures=1)),
    ).fit()
    lines = (Path(result.path) / "journal.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    transitions = [entry for entry in entries if "phase" in entry]
    assert any("rank 0: killed by SIGKILL" in entry["reason"] for entry in transitions)
    attempts = [entry["attempt"] for entry in transitions]
    assert attempts == sorted(attempts)
    assert set(attempts) == {0, 1}
    assert transitions[-1]["phase"] == "Concluded"
    assert entries[0]["event"] == "Opened"
    assert (entries[-2]["event"], entries[-2]["succeeded"]) == ("Concluded", True)
    assert entries[-1]["event"] == "Closed"
    assert len(result.history) == STEPS


def fail_once_with_a_checkpoint_if(makes_checkpoint: bool) -> None:
    for step in range(3):
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "model").write_text("model")
            checkpoint = Checkpoint.from_directory(directory) if makes_checkpoint else None
            polytrain.report({"loss": 1.0}, checkpoint=checkpoint)
        if step == 1 and polytrain.get_context().get_attempt() < 2:
            raise RuntimeError("once more")


@pytest.mark.parametrize("makes_checkpoint", [False, True])
def test_a_restart_without_a_checkpoint_is_warned_of_once(
    quiet: RunConfig, caplog: pytest.LogCaptureFixture, makes_checkpoint: bool
) -> None:
    checkpoints = CheckpointConfig(checkpoint_score_attribute="lss", num_to_keep=1)
    failures = FailureConfig(max_failures=3, retry_user_errors=True)
    make_trainer(
        "reference",
        partial(fail_once_with_a_checkpoint_if, makes_checkpoint),
        scaling_config=ScalingConfig(num_workers=0),
        run_config=dataclasses.replace(
            quiet, checkpoint_config=checkpoints, failure_config=failures
        ),
    ).fit()
    assert caplog.text.count("No checkpoint has been committed: attempt 1") == (
        0 if makes_checkpoint else 1
    )
    misspelt = "checkpoint_score_attribute='lss' doesn't rank the checkpoint"
    assert caplog.text.count(misspelt) == (1 if makes_checkpoint else 0)
    assert caplog.text.count("did you mean 'loss'?") == (1 if makes_checkpoint else 0)


def test_user_error_is_reported_with_the_cause(quiet: RunConfig) -> None:
    with pytest.raises(TrainingFailedError) as caught:
        make_trainer(
            "reference",
            divide_by_zero,
            scaling_config=ScalingConfig(num_workers=2),
            run_config=dataclasses.replace(quiet, failure_config=FailureConfig(max_failures=-1)),
        ).fit()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert "1 / 0" in caught.value.failures[0].traceback
    assert "ray" not in caught.value.failures[0].traceback
    # The same exception at the same step: a third attempt would raise it again.
    assert caught.value.result is not None
    assert caught.value.result.restarts == 1


def divide_by_zero() -> None:
    if polytrain.get_context().get_world_rank() == 0:
        1 / 0  # noqa: B018
    else:
        signal.pause()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_end_of_a_file_is_an_error_like_others(quiet: RunConfig, num_workers: int) -> None:
    """What a torn file raises isn't taken for the end of the line to whoever listens."""
    with pytest.raises(TrainingFailedError) as caught:
        make_trainer(
            "reference",
            read_a_torn_file,
            scaling_config=ScalingConfig(num_workers=num_workers),
            run_config=quiet,
        ).fit()
    assert caught.value.failures[0].kind is FailureKind.USER_ERROR
    assert "pickle.loads" in caught.value.failures[0].traceback


def read_a_torn_file() -> None:
    import pickle

    pickle.loads(b"")
