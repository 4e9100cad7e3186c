"""Observers are told what happens, each on its own: one that raises harms nobody else."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from typing import Any

import pluggy
import pytest

from polytrain.output.call_queues import CallQueues
from polytrain.output.observers import Observers
from polytrain_plugins import Attempt, CheckpointInfo, Outcome, Report, RunInfo, hookimpl

RUN = RunInfo(name="run", backend="reference", num_workers=2, path="/runs/run")
ATTEMPT = Attempt(number=1, checkpoint=None, num_workers=2)
REPORT = Report(rank=0, attempt=1, step=3, metrics={"loss": 0.5})
CHECKPOINT = CheckpointInfo(path="/runs/run/checkpoints/0", step=3, metrics={})
OUTCOME = Outcome(succeeded=True, reason="every rank finished", restarts=1)


class Diary:
    """Writes down all that it is told."""

    def __init__(self) -> None:
        self.entries: list[tuple[Any, ...]] = []

    @hookimpl
    def polytrain_run_started(self, run: RunInfo) -> None:
        self.entries.append(("run started", run))

    @hookimpl
    def polytrain_attempt_started(self, run: RunInfo, attempt: Attempt) -> None:
        self.entries.append(("attempt started", run, attempt))

    @hookimpl
    def polytrain_reported(self, report: Report) -> None:
        self.entries.append(("reported", report))

    @hookimpl
    def polytrain_checkpoint_committed(self, checkpoint: CheckpointInfo) -> None:
        self.entries.append(("committed", checkpoint))

    @hookimpl
    def polytrain_checkpoint_validated(self, checkpoint: CheckpointInfo) -> None:
        self.entries.append(("validated", checkpoint))

    @hookimpl
    def polytrain_attempt_ended(self, outcome: Outcome, attempt: Attempt) -> None:
        self.entries.append(("attempt ended", attempt, outcome))

    @hookimpl
    def polytrain_run_ended(self) -> None:
        self.entries.append(("run ended",))


class Broken:
    """Raises at the first report."""

    def __init__(self, error: BaseException) -> None:
        self.calls = 0
        self.error = error

    @hookimpl
    def polytrain_reported(self) -> None:
        self.calls += 1
        raise self.error

    @hookimpl
    def polytrain_run_ended(self) -> None:
        self.calls += 1


def test_observers_hear_everything_with_the_arguments_that_they_ask_for() -> None:
    diary = Diary()
    observers = Observers([diary])
    observers.run_started(RUN)
    observers.attempt_started(RUN, ATTEMPT)
    observers.reported(RUN, REPORT)
    observers.checkpoint_committed(RUN, CHECKPOINT)
    observers.checkpoint_validated(RUN, CHECKPOINT)
    observers.attempt_ended(RUN, ATTEMPT, OUTCOME)
    observers.run_ended(RUN, OUTCOME)
    assert diary.entries == [
        ("run started", RUN),
        ("attempt started", RUN, ATTEMPT),
        ("reported", REPORT),
        ("committed", CHECKPOINT),
        ("validated", CHECKPOINT),
        ("attempt ended", ATTEMPT, OUTCOME),
        ("run ended",),
    ]


@pytest.mark.parametrize("error", [RuntimeError("no connection"), SystemExit("no connection")])
def test_one_that_raises_is_logged_and_not_called_again(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    before, broken, after = Diary(), Broken(error), Diary()
    observers = Observers([before, broken, after])
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            observers.reported(RUN, REPORT)
        observers.run_ended(RUN, OUTCOME)
    assert broken.calls == 1
    assert before.entries == after.entries == [("reported", REPORT)] * 3 + [("run ended",)]
    [record] = caplog.records
    assert "polytrain_reported" in record.getMessage()
    assert "no connection" in str(record.exc_info)


def test_a_misspelt_hook_is_an_error_that_names_it() -> None:
    class Misspelt:
        @hookimpl
        def polytrain_reportet(self, report: Report) -> None: ...

    with pytest.raises(pluggy.PluginValidationError, match="polytrain_reportet"):
        Observers([Misspelt()])


def test_an_argument_that_no_hook_has_is_an_error_that_names_it() -> None:
    class Curious:
        @hookimpl
        def polytrain_reported(self, metrics: Any) -> None: ...

    with pytest.raises(pluggy.PluginValidationError, match="metrics"):
        Observers([Curious()])


class Tidies:
    """Changes the metrics that it gets, as before it sends them somewhere."""

    def _tidy(self, metrics: Any) -> None:
        metrics.pop("loss")
        metrics["eval"]["errors"].append("mine")

    @hookimpl
    def polytrain_reported(self, report: Report) -> None:
        self._tidy(report.metrics)

    @hookimpl
    def polytrain_checkpoint_committed(self, checkpoint: CheckpointInfo) -> None:
        self._tidy(checkpoint.metrics)


def test_metrics_that_an_observer_changes_are_its_own() -> None:
    """Otherwise the history, trackers and the ranking of checkpoints would have them."""
    metrics = {"loss": 0.5, "eval": {"errors": ["a"]}}
    report = replace(REPORT, metrics=metrics)
    checkpoint = replace(CHECKPOINT, metrics=metrics)
    diary = Diary()
    observers = Observers([Tidies(), diary])
    observers.reported(RUN, report)
    observers.checkpoint_committed(RUN, checkpoint)
    assert metrics == {"loss": 0.5, "eval": {"errors": ["a"]}}
    assert diary.entries == [("reported", report), ("committed", checkpoint)]


class Equal(Diary):
    """Has the name of every other, too."""

    __name__ = "equal"

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]  # as of a dataclass that isn't frozen


def test_each_of_several_equal_observers_is_told() -> None:
    diaries = Equal(), Equal()
    Observers(diaries).reported(RUN, REPORT)
    assert [each.entries for each in diaries] == [[("reported", REPORT)]] * 2


def test_an_observer_that_is_installed_and_passed_too_is_told_once() -> None:
    diary = Diary()
    Observers([diary, diary]).reported(RUN, REPORT)
    assert diary.entries == [("reported", REPORT)]


def test_runs_do_not_share_their_observers() -> None:
    mine, others = Diary(), Diary()
    first, _ = Observers([mine]), Observers([others])
    first.run_started(RUN)
    assert (len(mine.entries), len(others.entries)) == (1, 0)


class Slow:
    """Takes the first report only when it is released."""

    def __init__(self) -> None:
        self.released, self.entries = threading.Event(), list[str]()

    @hookimpl
    def polytrain_attempt_started(self) -> None:
        self.entries.append("attempt started")

    @hookimpl
    def polytrain_reported(self) -> None:
        self.released.wait()
        self.entries.append("reported")


def test_nobody_waits_for_an_observer_except_before_processes_start() -> None:
    slow, quick = Slow(), Diary()
    with CallQueues() as queues:
        observers = Observers([slow, quick], queues=queues)
        observers.attempt_started(RUN, ATTEMPT)
        assert slow.entries == ["attempt started"]
        observers.reported(RUN, REPORT)
        assert queues.of(quick).finish()
        assert slow.entries == ["attempt started"]
        assert quick.entries == [("attempt started", RUN, ATTEMPT), ("reported", REPORT)]
        slow.released.set()
        observers.finish()
        assert slow.entries == ["attempt started", "reported"]


def test_an_observer_that_takes_too_long_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("polytrain.output.observers.END_WITHIN_S", 0.05)
    slow, quick = Slow(), Diary()
    with CallQueues() as queues:
        observers = Observers([slow, quick], queues=queues)
        observers.reported(RUN, REPORT)
        assert queues.of(quick).finish()
        observers.finish()
        slow.released.set()
    [record] = caplog.records
    assert "'Slow' hasn't taken all calls" in record.getMessage()


def test_an_interrupt_passes_through() -> None:
    """Ctrl-C while an observer writes ends the run, not the observer."""

    class Interrupted:
        @hookimpl
        def polytrain_reported(self) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Observers([Interrupted()]).reported(RUN, REPORT)
