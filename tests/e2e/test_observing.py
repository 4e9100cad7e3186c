"""What observers get of a run: every rank's reports, attempts, failures, and a way to stop it."""

from __future__ import annotations

import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

import polytrain
from polytrain import (
    Checkpoint,
    FailureConfig,
    Result,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
    make_trainer,
)
from polytrain.testing.processes import eventually
from polytrain_plugins import Attempt, Outcome, Report, hookimpl

STEPS = 20
FAILS_AT = 7


class UnstableError(RuntimeError):
    """Raised by rank 1 in the first attempt."""


def train(config: dict[str, str]) -> None:
    context, done = polytrain.get_context(), 0
    rank = context.get_world_rank()
    if (checkpoint := polytrain.get_checkpoint()) is not None:
        with checkpoint.as_directory() as directory:
            done = int(Path(directory, "step").read_text())
    for step in range(done + 1, STEPS + 1):
        if step == FAILS_AT and context.get_attempt() == 0:
            rank_0_is_here = Path(config["meeting"])
            if rank == 1 and eventually(rank_0_is_here.exists):
                print("rank 1 is about to fail")
                raise UnstableError("the loss is not finite")
            rank_0_is_here.touch()
            signal.pause()
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "step").write_text(str(step))
            kept = Checkpoint.from_directory(directory) if rank == 0 else None
            polytrain.report({"rank": rank, "step": step}, checkpoint=kept, upload="sync")


@dataclass
class Recorder:
    """Records what it is called with."""

    attempts: list[Attempt] = field(default_factory=list)
    reports: list[Report] = field(default_factory=list)
    of_rank_0: list[Report] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    ends: list[Outcome] = field(default_factory=list)

    @hookimpl
    def polytrain_attempt_started(self, attempt: Attempt) -> None:
        self.attempts.append(attempt)

    @hookimpl
    def polytrain_rank_reported(self, report: Report) -> None:
        self.reports.append(report)

    @hookimpl
    def polytrain_reported(self, report: Report) -> None:
        self.of_rank_0.append(report)

    @hookimpl
    def polytrain_attempt_ended(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)

    @hookimpl
    def polytrain_run_ended(self, outcome: Outcome) -> None:
        self.ends.append(outcome)


@dataclass
class Observed:
    recorder: Recorder
    result: Result
    began: float
    ended: float


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Observed:
    recorder, began = Recorder(), time.time()
    result = make_trainer(
        "reference",
        train,
        train_loop_config={"meeting": str(tmp_path_factory.mktemp("meeting") / "rank 0")},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            storage_path=tmp_path_factory.mktemp("runs"),
            progress=False,
            observers=(recorder,),
            failure_config=FailureConfig(max_failures=1),
        ),
    ).fit()
    return Observed(recorder, result, began, time.time())


def test_every_report_of_every_rank_is_passed_on(observed: Observed) -> None:
    for rank in (0, 1):
        steps = [each.step for each in observed.recorder.reports if each.rank == rank]
        assert steps[-STEPS + FAILS_AT - 1 :] == list(range(FAILS_AT, STEPS + 1))
        assert steps[: FAILS_AT - 1] == list(range(1, FAILS_AT))
    of_rank_0 = [each for each in observed.recorder.reports if each.rank == 0]
    assert of_rank_0 == observed.recorder.of_rank_0
    assert all(each.metrics["rank"] == each.rank for each in observed.recorder.reports)


def test_reports_have_the_time_at_which_they_were_made(observed: Observed) -> None:
    """Not when they came here: then many would have the same."""
    times = [each.time for each in observed.recorder.of_rank_0]
    assert times == sorted(set(times))
    assert observed.began < times[0] < times[-1] < observed.ended


def test_attempts_have_their_number_and_first_step(observed: Observed) -> None:
    attempts = [(each.number, each.first_step) for each in observed.recorder.attempts]
    assert attempts == [(0, 1), (1, FAILS_AT)]


def test_failures_come_with_their_exception_and_log(observed: Observed) -> None:
    failed, succeeded = observed.recorder.outcomes
    [failure] = failed.failures
    assert (failure.kind, failure.rank, failure.step) == ("user_error", 1, FAILS_AT - 1)
    assert isinstance(failure.exception, UnstableError)
    assert str(failure.exception) == "the loss is not finite"
    assert "raise UnstableError" in failure.traceback
    assert Path(failure.log) == Path(observed.result.path, "logs", "rank_1.log")
    assert "rank 1 is about to fail" in Path(failure.log).read_text()
    assert succeeded.failures == ()
    [end] = observed.recorder.ends
    assert (end.succeeded, end.failures, end.stopped) == (True, (), None)


class StopsAt:
    """Stops the run in the hook that gets a report of this step."""

    def __init__(self, step: int) -> None:
        self._step = step
        self.outcome: Outcome | None = None

    @hookimpl
    def polytrain_reported(self, report: Report, stop: Callable[[str], None]) -> None:
        if report.step == self._step:
            stop("the loss is low enough")

    @hookimpl
    def polytrain_run_ended(self, outcome: Outcome) -> None:
        self.outcome = outcome


def saves() -> None:
    step = 0
    while True:
        step += 1
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "step").write_text(str(step))
            polytrain.report({"step": step}, checkpoint=Checkpoint.from_directory(directory))


def never_saves() -> None:
    while True:
        polytrain.report({})


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("function", [saves, never_saves])
def test_an_observer_ends_the_run(
    tmp_path: Path, workers: int, function: Callable[[], None]
) -> None:
    observer = StopsAt(3)
    result = make_trainer(
        "reference",
        function,
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(storage_path=tmp_path, progress=False, observers=(observer,)),
    ).fit()
    for found in (result, Result.from_path(result.path)):
        assert not found.finished
        assert found.error is None
        assert found.stopped is not None
        assert found.stopped.by == "observer"
        assert found.stopped.reason == "StopsAt: the loss is low enough"
        assert len(found.history) >= 3
    assert observer.outcome is not None
    assert observer.outcome.stopped == result.stopped
    if function is saves:
        assert result.checkpoint is not None
        with result.checkpoint.as_directory() as directory:
            assert int(Path(directory, "step").read_text()) == result.metrics["step"]


def fails() -> None:
    print("what explains it")
    raise ValueError("no")


@pytest.mark.parametrize("show", ["all", "none"])
def test_a_failure_names_the_runs_directory_and_the_log(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], show: Literal["all", "none"]
) -> None:
    with pytest.raises(TrainingFailedError) as raised:
        make_trainer(
            "reference",
            fails,
            run_config=RunConfig(name="run", storage_path=tmp_path, show_output=show),
        ).fit()
    output, errors = capfd.readouterr()
    assert ("(rank 0) what explains it" in output) == (show == "all")
    log = tmp_path / "run" / "logs" / "rank_0.log"
    printed, _, raised_there = log.read_text().partition("\nTraceback")
    assert printed == "what explains it\n"
    assert raised_there.endswith('    raise ValueError("no")\nValueError: no\n')
    text = str(raised.value)
    assert raised.value.log == str(log)
    # The first line says it, and the last one, as in a traceback of Python's.
    assert text.splitlines()[0].startswith("rank 0: ValueError: no")
    assert text.endswith('    raise ValueError("no")\nValueError: no')
    assert text.count("ValueError: no") == 2
    # The traceback begins with the user's code.
    assert "worker_process" not in text
    assert "The last lines of rank 0:\n    what explains it\n" in text
    assert f"The run's directory: {tmp_path / 'run'}\n" in text
    assert f"To see more: polytrain logs {tmp_path / 'run'} --rank 0\n" in text
    # The exception says it, and nobody else.
    assert "what explains it" not in errors
    assert "ValueError" not in errors
