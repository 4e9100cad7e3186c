"""The ledger of real runs: all of the time is in it, each part in its account."""

from __future__ import annotations

import dataclasses
import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.sweeps import only_in_sweep

import polytrain
from polytrain import (
    Checkpoint,
    CheckpointConfig,
    FailureConfig,
    Result,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
    make_trainer,
)
from polytrain.api.trainer import Trainer
from polytrain.record.ledger import ACCOUNTS
from polytrain.testing.contract import kit_table
from polytrain_plugins import Report, hookimpl

KEPT_STEP, LAST_STEP = 2, 6


def trainer(function: object, config: RunConfig, *, workers: int = 2, failures: int = 0) -> Trainer:
    return make_trainer(
        "reference",
        function,  # type: ignore[arg-type]
        datasets={"train": kit_table()},
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=dataclasses.replace(config, failure_config=FailureConfig(max_failures=failures)),
    )


def train(*, killed_at: int) -> None:
    """Steps of half a second each; one of them is kept, and rank 0 dies after another."""
    checkpoint = polytrain.get_checkpoint()
    done = 0 if checkpoint is None else int((Path(checkpoint.path) / "step").read_text())
    context = polytrain.get_context()
    for step in range(done + 1, LAST_STEP + 1):
        work()
        kept = None
        with tempfile.TemporaryDirectory() as directory:
            if step == KEPT_STEP and context.get_world_rank() == 0:
                (Path(directory) / "step").write_text(str(step))
                kept = Checkpoint.from_directory(directory)
            polytrain.report({"step": step}, checkpoint=kept, upload="sync")
        if (step, context.get_world_rank(), context.get_attempt()) == (killed_at, 0, 0):
            os.kill(os.getpid(), signal.SIGKILL)


def work() -> None:
    end = time.perf_counter() + 0.5
    while time.perf_counter() < end:
        sum(range(1000))


def train_to_the_end() -> None:
    train(killed_at=0)


def train_and_be_killed() -> None:
    train(killed_at=KEPT_STEP + 3)


class FirstToLastHook:
    """An observer that measures from the start of the run until its workers are gone."""

    began = ended = 0.0

    @hookimpl
    def polytrain_run_started(self) -> None:
        self.began = time.time()

    @hookimpl
    def polytrain_run_ended(self) -> None:
        self.ended = time.time()

    @property
    def seconds(self) -> float:
        return self.ended - self.began


@pytest.mark.sweep
@pytest.mark.parametrize("workers", [only_in_sweep(0), 2])
def test_the_accounts_add_up_to_the_time_that_fit_has_taken(quiet: RunConfig, workers: int) -> None:
    within = FirstToLastHook()
    watched = dataclasses.replace(quiet, observers=(within,))
    ready = trainer(train_to_the_end, watched, workers=workers)
    before = time.time()
    result = ready.fit()
    measured = time.time() - before
    ledger = result.ledger
    assert sum(ledger.seconds.values()) == ledger.wall_s
    # What comes before the first hook and after the last one counts as well.
    assert 0 < within.seconds < ledger.wall_s < measured
    assert ledger.seconds["train"] >= 0.45 * LAST_STEP
    assert ledger.goodput == ledger.seconds["train"] / ledger.wall_s
    assert ledger.seconds["checkpoint_stall"] > 0
    without_a_failure = ("detect", "teardown", "reschedule", "data_reload", "replayed_work")
    assert [ledger.seconds[account] for account in without_a_failure] == [0] * 5
    assert (ledger.lost_steps, ledger.restarts) == (0, 0)


def test_a_killed_rank_costs_three_steps_and_all_that_it_takes_to_be_back(
    quiet: RunConfig,
) -> None:
    result = trainer(train_and_be_killed, quiet, failures=1).fit()
    ledger = result.ledger
    assert result.restarts == ledger.restarts == 1
    assert ledger.lost_steps == 3
    # Nothing copies its state.
    assert [account for account in ACCOUNTS if not ledger.seconds[account] > 0] == ["snapshot"]
    # Three steps were done twice, and no others.
    assert 3 * 0.45 < ledger.seconds["replayed_work"] < ledger.seconds["train"]
    assert ledger.seconds["train"] > 0.45 * LAST_STEP
    assert Result.from_path(result.path).ledger == ledger


def test_a_run_that_has_failed_is_accounted_for_too(quiet: RunConfig) -> None:
    within = FirstToLastHook()
    ready = trainer(train_and_be_killed, dataclasses.replace(quiet, observers=(within,)))
    before = time.time()
    with pytest.raises(TrainingFailedError) as caught:
        ready.fit()
    measured = time.time() - before
    assert caught.value.result is not None
    ledger = caught.value.result.ledger
    assert 0 < within.seconds < ledger.wall_s < measured
    assert ledger.seconds["teardown"] > 0


def stand_still_once() -> None:
    context = polytrain.get_context()
    polytrain.report({"attempt": context.get_attempt()})
    if (context.get_world_rank(), context.get_attempt()) == (1, 0):
        os.kill(os.getpid(), signal.SIGSTOP)


def test_the_time_without_progress_of_a_hang_is_detection(quiet: RunConfig) -> None:
    config = FailureConfig(max_failures=1, hang_timeout_s=2.0)
    result = make_trainer(
        "reference",
        stand_still_once,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=dataclasses.replace(quiet, failure_config=config),
    ).fit()
    assert result.ledger.restarts == 1
    assert result.ledger.seconds["detect"] > 1.9
    assert result.ledger.seconds["train"] < result.ledger.seconds["detect"]


class StopAt:
    """An observer that asks for the run's end when a step is reported."""

    @hookimpl
    def polytrain_reported(self, report: Report, stop: Callable[[str], None]) -> None:
        if report.step == KEPT_STEP:
            stop("it is resumed later")


@pytest.mark.sweep
@pytest.mark.parametrize("workers", [only_in_sweep(0), 2])
def test_a_run_that_is_gone_on_with_has_the_time_of_both_drivers(
    quiet: RunConfig, workers: int
) -> None:
    config = dataclasses.replace(
        quiet, name="run", checkpoint_config=CheckpointConfig(checkpoint_frequency=0)
    )

    def declared(*observers: object) -> Trainer:
        return make_trainer(
            "reference",
            rounds=8_000,
            label="label",
            datasets={"train": kit_table()},
            scaling_config=ScalingConfig(num_workers=workers),
            run_config=dataclasses.replace(config, observers=observers),
        )

    stopped = declared(StopAt()).fit()
    assert not stopped.finished
    first = dict(stopped.ledger.seconds)
    assert stopped.ledger.lost_steps == 0
    assert Result.from_path(stopped.path).ledger == stopped.ledger

    result = declared().fit()
    assert result.finished
    ledger = result.ledger
    assert all(ledger.seconds[account] >= first[account] for account in ACCOUNTS)
    assert ledger.seconds["start"] > first["start"]
    assert ledger.seconds["train"] > first["train"]
    assert ledger.seconds["data_load"] == first["data_load"]
    assert ledger.seconds["data_reload"] > 0
    # It was stopped after a checkpoint: nothing was done twice.
    assert (ledger.lost_steps, ledger.seconds["replayed_work"]) == (0, 0)
    assert Result.from_path(result.path).ledger == ledger
