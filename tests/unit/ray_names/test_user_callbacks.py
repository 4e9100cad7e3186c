"""When callbacks are called, and with what: once all ranks have reported, in order."""

from __future__ import annotations

import logging
import pickle
from typing import Any

import pytest

from polytrain.checkpoint.checkpoint import Checkpoint
from polytrain.checkpoint.store import CheckpointStore
from polytrain.config.configs import RunConfig, ScalingConfig
from polytrain.errors import Failure, FailureKind
from polytrain.ray_names.callbacks import (
    TrainRunContext,
    UserCallback,
    UserCallbacks,
    callback_problems,
)
from polytrain.record.entries import (
    AttemptEnded,
    CheckpointCommitted,
    Launched,
    MetricsReported,
    RunConcluded,
)
from polytrain.storage.location import Location
from polytrain_plugins import RunInfo

STORE = CheckpointStore(location=Location.of("/runs/run"))

CONTEXT = TrainRunContext(
    run=RunInfo(name="run", backend="reference", num_workers=2, path="/runs/run"),
    run_config=RunConfig(),
    scaling_config=ScalingConfig(),
    train_loop_config=None,
)


class Noted(UserCallback):
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def after_report(self, run_context: Any, metrics: Any, checkpoint: Any) -> None:
        assert run_context is CONTEXT
        self.calls.append((metrics, checkpoint and checkpoint.path))

    def after_exception(self, run_context: Any, worker_exceptions: Any) -> None:
        assert run_context is CONTEXT
        self.calls.append({rank: repr(error) for rank, error in worker_exceptions.items()})


def started(*callbacks: Any, ranks: int = 2) -> UserCallbacks:
    made = UserCallbacks(callbacks, CONTEXT, STORE)
    made.take(launched(ranks))
    return made


def launched(ranks: int, *, step: int = 0) -> Launched:
    return Launched(attempt=0, step=step, start=None, world_size=ranks)


def report(rank: int, step: int, *, has_checkpoint: bool = False) -> MetricsReported:
    return MetricsReported(
        rank=rank,
        step=step,
        metrics={"rank": rank, "step": step},
        has_checkpoint=has_checkpoint,
    )


def commit(step: int) -> CheckpointCommitted:
    return CheckpointCommitted(checkpoint=str(step), step=step)


def ended(*failures: Failure) -> AttemptEnded:
    return AttemptEnded(attempt=0, failure=failures[0], reason="", failures=failures)


def of_both(step: int) -> list[dict[str, int]]:
    return [{"rank": rank, "step": step} for rank in (0, 1)]


def test_a_report_is_reported_once_all_ranks_have_made_it() -> None:
    noted = Noted()
    callbacks = started(noted)
    for step in (1, 2):
        callbacks.take(report(0, step))
    assert noted.calls == []
    for step in (1, 2):
        callbacks.take(report(1, step))
        assert noted.calls[-1] == (of_both(step), None)


def test_a_report_with_a_checkpoint_is_reported_after_the_commit_and_in_order() -> None:
    noted = Noted()
    callbacks = started(noted)
    callbacks.take(report(1, 1))
    callbacks.take(report(0, 1, has_checkpoint=True))
    for rank in (0, 1):
        callbacks.take(report(rank, 2))
    assert noted.calls == []
    callbacks.take(commit(1))
    assert noted.calls == [(of_both(1), "/runs/run/checkpoints/1"), (of_both(2), None)]


def test_a_checkpoint_that_is_dropped_holds_up_nothing() -> None:
    noted = Noted()
    callbacks = started(noted, ranks=1)
    for step in (1, 2):
        callbacks.take(report(0, step, has_checkpoint=True))
    callbacks.take(commit(2))
    assert [checkpoint for _, checkpoint in noted.calls] == [None, "/runs/run/checkpoints/2"]


def test_what_other_ranks_never_report_is_reported_at_the_end() -> None:
    noted = Noted()
    callbacks = started(noted)
    callbacks.take(report(0, 1))
    callbacks.take(RunConcluded(succeeded=True, stopped=None, reason=""))
    assert noted.calls == [([{"rank": 0, "step": 1}, {}], None)]


def test_what_no_attempt_repeats_is_reported_though_a_rank_was_lost_before_it() -> None:
    noted = Noted()
    callbacks = started(noted)
    for step in (1, 2, 3):
        callbacks.take(report(0, step, has_checkpoint=step == 2))
    callbacks.take(report(1, 1))
    callbacks.take(commit(2))
    callbacks.take(ended(Failure(kind=FailureKind.WORKER_LOST, rank=1, message="killed")))
    callbacks.take(launched(2, step=2))
    for rank in (0, 1):
        callbacks.take(report(rank, 3))
    assert noted.calls == [
        (of_both(1), None),
        ([{"rank": 0, "step": 2}, {}], "/runs/run/checkpoints/2"),
        {1: "RuntimeError('killed')"},
        (of_both(3), None),
    ]


def test_reports_of_one_rank_alone_do_not_fill_the_memory() -> None:
    noted = Noted()
    callbacks = started(noted)
    for step in range(1, 10_101):
        callbacks.take(report(0, step))
    assert len(noted.calls) == 100
    assert noted.calls[0] == ([{"rank": 0, "step": 1}, {}], None)


def test_the_next_attempt_begins_anew() -> None:
    noted = Noted()
    callbacks = started(noted, ranks=1)
    callbacks.take(commit(9))
    callbacks.take(launched(1))
    callbacks.take(report(0, 1, has_checkpoint=True))
    assert noted.calls == []


def test_exceptions_of_ranks_are_reported() -> None:
    noted = Noted()
    kinds = FailureKind.USER_ERROR, FailureKind.WORKER_LOST, FailureKind.STORAGE
    user, lost, storage = kinds
    started(noted).take(
        ended(
            Failure(kind=user, rank=1, message="bad", error=pickle.dumps(ValueError("bad"))),
            Failure(kind=lost, rank=0, message="killed by SIGKILL"),
            Failure(kind=user, rank=2, message="unknown", error=b"no pickle"),
            Failure(kind=storage, rank=None, message="full"),
        )
    )
    assert noted.calls == [
        {
            1: "ValueError('bad')",
            0: "RuntimeError('killed by SIGKILL')",
            2: "RuntimeError('unknown')",
        }
    ]


class Raises(UserCallback):
    def __init__(self, error: BaseException) -> None:
        self.calls = 0
        self.error = error

    def after_report(self, run_context: Any, metrics: Any, checkpoint: Any) -> None:
        self.calls += 1
        raise self.error


@pytest.mark.parametrize("error", [OSError("no network"), SystemExit("no network")])
def test_a_callback_that_raises_is_left_out_from_then_on(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    raises, noted = Raises(error), Noted()
    callbacks = started(raises, noted, ranks=1)
    with caplog.at_level(logging.ERROR):
        for step in (1, 2):
            callbacks.take(report(0, step))
    assert raises.calls == 1
    assert len(noted.calls) == 2
    assert "The callback 'Raises' raised in after_report and is not called again" in caplog.text


class OnlyReports:
    """A class of the user's, or Ray Train's own."""

    def after_report(self, run_context: Any, metrics: Any, checkpoint: Checkpoint | None) -> None:
        """It needs no other method."""


class Loaded:
    """What a framework's exception is made of: to load it imports the framework."""

    times = 0

    def __reduce__(self) -> Any:
        return _load, ()


def _load() -> Exception:
    Loaded.times += 1
    return ValueError("bad")


class Nothing(UserCallback):
    """Overrides nothing."""


class Forwards:
    """Has the methods of another callback, and none in its class."""

    def __init__(self, callback: UserCallback) -> None:
        self.after_exception = callback.after_exception


@pytest.mark.parametrize(
    ("callbacks", "times"),
    [
        ((), 0),
        ((OnlyReports(), Nothing()), 0),
        ((OnlyReports(), Noted()), 1),
        ((Forwards(Noted()),), 1),
        ((Forwards(Nothing()),), 0),
    ],
)
def test_exceptions_are_loaded_for_callbacks_that_take_them(
    callbacks: tuple[Any, ...], times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next attempt waits meanwhile."""
    monkeypatch.setattr(Loaded, "times", 0)
    error = pickle.dumps(Loaded())
    started(*callbacks).take(
        ended(Failure(kind=FailureKind.USER_ERROR, rank=1, message="bad", error=error))
    )
    assert Loaded.times == times


class Unawaited(UserCallback):
    async def after_report(self, *given: Any) -> None:  # type: ignore[override]  # it is wrong
        """Nobody awaits it."""


@pytest.mark.parametrize(
    ("given", "what"),
    [
        (Noted(), "it is a Noted"),
        ([Noted], "it is the class Noted"),
        ([Unawaited()], "[0].after_report: calling after_report makes a coroutine"),
        ([print], "has neither after_report nor after_exception"),
        ([OnlyReports(), Noted()], ""),
        ((), ""),
    ],
)
def test_what_is_no_callback_is_refused(given: Any, what: str) -> None:
    problems = [str(problem) for problem in callback_problems(given)]
    assert len(problems) == bool(what)
    assert all(what in problem for problem in problems)


class Tidies(Noted):
    def after_report(self, run_context: Any, metrics: Any, checkpoint: Any) -> None:
        super().after_report(run_context, [dict(each) for each in metrics], checkpoint)
        metrics.pop()["eval"].clear()


def test_metrics_that_a_callback_changes_are_its_own() -> None:
    first, second = Tidies(), Tidies()
    made = started(first, second, ranks=1)
    reported = MetricsReported(rank=0, step=1, metrics={"eval": {"loss": 1}}, has_checkpoint=False)
    made.take(reported)
    assert first.calls == [([{"eval": {}}], None)]
    assert second.calls == first.calls
    assert reported.metrics == {"eval": {"loss": 1}}
