"""Callbacks of Ray Train's kind: `RunConfig(callbacks=…)`."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from polytrain.checkpoint.checkpoint import Checkpoint
from polytrain.checkpoint.store import CheckpointStore
from polytrain.config.configs import RunConfig, ScalingConfig
from polytrain.errors import Failure
from polytrain.functions.function_checks import deferred_problems
from polytrain.output.call_queues import CallQueues, GuardedCalls
from polytrain.output.observers import END_WITHIN_S
from polytrain.record.entries import (
    AttemptEnded,
    CheckpointCommitted,
    Entry,
    Launched,
    MetricsReported,
    RunConcluded,
)
from polytrain.run.run import Run
from polytrain.text.described import ShortRepr
from polytrain.text.metrics import copied
from polytrain_plugins import Problem, RunInfo
from polytrain_plugins.type_names import a_type

_METHODS = ("after_report", "after_exception")

_LONGEST_WAIT = 10_000
"""Reports that wait for other ranks; then the oldest is passed on without them."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class TrainRunContext(ShortRepr):
    """The run that a callback is called for."""

    run: RunInfo
    run_config: RunConfig
    scaling_config: ScalingConfig
    train_loop_config: Any
    """What the training function is called with."""

    def get_run_config(self) -> RunConfig:
        """The run's configuration."""
        return self.run_config


class UserCallback:
    """Called in the process that called `fit()`; subclasses override what they need.

    Each has a thread of its own, so that a run doesn't wait for it: a slow one is called late, in
    order. One that raises is logged and not called again; training continues.
    """

    def after_report(
        self,
        run_context: TrainRunContext,
        metrics: list[dict[str, Any]],
        checkpoint: Checkpoint | None,
    ) -> None:
        """All ranks have made a report, and its checkpoint is committed.

        Args:
            run_context: the run.
            metrics: each rank's metrics, by rank; empty for a rank that has ended without this
                report.
            checkpoint: the committed checkpoint; None if no rank reported one, or if it was
                dropped.
        """

    def after_exception(
        self, run_context: TrainRunContext, worker_exceptions: dict[int, Exception]
    ) -> None:
        """Ranks have failed, and all processes of the attempt are gone.

        Args:
            run_context: the run.
            worker_exceptions: rank → its exception; a RuntimeError that says what happened, if it
                raised none.
        """


def callback_problems(callbacks: Any) -> Iterator[Problem]:
    """Yield what is wrong with a run's callbacks.

    Args:
        callbacks: what the user passed as `RunConfig.callbacks`.
    """
    field_name = "RunConfig.callbacks"
    if not isinstance(callbacks, tuple | list):
        yield Problem(
            field=field_name,
            what=f"it is {a_type(callbacks)}",
            remedy="Give a list of callbacks, also for one: callbacks=[…]",
        )
        return
    for place, callback in enumerate(callbacks):
        methods = [(name, getattr(callback, name, None)) for name in _METHODS]
        if isinstance(callback, type):
            yield Problem(
                field=f"{field_name}[{place}]",
                what=f"it is the class {callback.__name__}",
                remedy=f"Give {callback.__name__}(…)",
            )
        elif not any(callable(method) for _, method in methods):
            yield Problem(
                field=f"{field_name}[{place}]",
                what=f"{a_type(callback)} has neither {' nor '.join(_METHODS)}",
                remedy="Give an object of a subclass of polytrain.UserCallback",
            )
        else:
            for name, method in methods:
                yield from deferred_problems(
                    f"{field_name}[{place}].{name}", method, effect="and does nothing"
                )


def opened(run: Run, queues: CallQueues) -> UserCallbacks:
    """Return what calls a run's callbacks.

    Args:
        run: the run.
        queues: call them, so that nobody waits for a callback.
    """
    context = TrainRunContext(
        run=run.info,
        run_config=run.spec.run_config,
        scaling_config=run.spec.scaling_config,
        train_loop_config=run.spec.train_loop_config,
    )
    store = CheckpointStore(location=run.location)
    return UserCallbacks(run.spec.run_config.callbacks, context, store, queues=queues)


@dataclass(slots=True)
class _Step:
    """What is known of one report of all ranks."""

    metrics: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    """Rank → what it has reported."""

    has_checkpoint: bool = False
    checkpoint: str | None = None
    """The directory of the one that is committed."""


class UserCallbacks:
    """Calls a run's callbacks: for reports in order, each once all that belongs to it is known."""

    def __init__(
        self,
        callbacks: Sequence[Any],
        context: TrainRunContext,
        store: CheckpointStore,
        *,
        queues: CallQueues | None = None,
    ) -> None:
        """
        Args:
            callbacks: the user's.
            context: what they are called with.
            store: the run's checkpoints.
            queues: call them, so that nobody waits for a callback; by default they are called at
                once.
        """
        queues = CallQueues(at_once=True) if queues is None else queues
        self._calls = GuardedCalls("callback", queues)
        self._callbacks = list(callbacks)
        self._context = context
        self._store = store
        self._ranks = 1
        self._steps: dict[int, _Step] = {}
        self._committed = 0
        """Step of the newest commit."""

    def __enter__(self) -> UserCallbacks:
        return self

    def __exit__(self, *_: object) -> None:
        """Wait until all calls are made, for a limited time."""
        self._calls.finish(self._callbacks, within_s=END_WITHIN_S)

    def take(self, entry: Entry) -> None:
        """Take the next entry of the run's journal, or a report of any rank."""
        match entry:
            case Launched(world_size=ranks):
                self._ranks = ranks
                self._steps.clear()
                self._committed = 0
            case MetricsReported():
                self._reported(entry)
            case CheckpointCommitted():
                self._take_commit(entry)
            case AttemptEnded(failures=failures):
                # The next one makes the reports after the newest checkpoint again.
                self._tell([each for each in sorted(self._steps) if each <= self._committed])
                if any(failure.rank is not None for failure in failures):
                    # Loaded where they are used: that may import a framework.
                    self._call("after_exception", lambda: (_exceptions(failures),))
            case RunConcluded(succeeded=True):
                # What some ranks have reported, and the others never will.
                self._tell(sorted(self._steps))

    def _reported(self, report: MetricsReported) -> None:
        step = self._steps.setdefault(report.step, _Step())
        step.metrics[report.rank] = report.metrics
        step.has_checkpoint |= report.has_checkpoint
        self._tell(self._complete())
        if len(self._steps) > _LONGEST_WAIT:
            self._tell([min(self._steps)])

    def _take_commit(self, committed: CheckpointCommitted) -> None:
        self._committed = max(self._committed, committed.step)
        if committed.step in self._steps:
            self._steps[committed.step].checkpoint = committed.checkpoint
        self._tell(self._complete())

    def _complete(self) -> list[int]:
        """The steps of which all is known, up to the first one of which it isn't."""
        complete = []
        for number in sorted(self._steps):
            step = self._steps[number]
            # One that isn't committed before a later one never will be.
            is_stored = not step.has_checkpoint or step.checkpoint or self._committed > number
            if len(step.metrics) < self._ranks or not is_stored:
                break
            complete.append(number)
        return complete

    def _tell(self, steps: Sequence[int]) -> None:
        for number in steps:
            step = self._steps.pop(number)
            metrics = [step.metrics.get(rank, {}) for rank in range(self._ranks)]
            checkpoint = None if step.checkpoint is None else self._checkpoint(step.checkpoint)
            self._call("after_report", partial(_of_report, metrics, checkpoint))

    def _checkpoint(self, directory: str) -> Checkpoint:
        location = self._store.location_of(directory)
        return Checkpoint(location.address, location.filesystem)

    def _call(self, method: str, arguments: Callable[[], tuple[Any, ...]]) -> None:
        def call(callback: Any) -> None:
            getattr(callback, method)(self._context, *arguments())

        for callback in self._callbacks:
            if _overrides(callback, method):
                self._calls.submit(callback, method, partial(call, callback))


def _of_report(
    metrics: Sequence[Mapping[str, Any]], checkpoint: Checkpoint | None
) -> tuple[list[dict[str, Any]], Checkpoint | None]:
    """Return a callback's arguments, with metrics of its own."""
    return [copied(each) for each in metrics], checkpoint


def _overrides(callback: Any, method: str) -> bool:
    """Whether a callback has a method that isn't the one of `UserCallback`, which does nothing."""
    own = getattr(callback, method, None)
    return own is not None and getattr(own, "__func__", own) is not getattr(UserCallback, method)


def _exceptions(failures: Sequence[Failure]) -> dict[int, Exception]:
    """Each failed rank's first exception."""
    found: dict[int, Exception] = {}
    for failure in failures:
        if failure.rank is not None and failure.rank not in found:
            found[failure.rank] = _exception(failure)
    return found


def _exception(failure: Failure) -> Exception:
    if failure.error is not None:
        try:
            exception = pickle.loads(failure.error)
        except Exception:  # its class may not exist in this process; there is its text
            exception = None
        if isinstance(exception, Exception):
            return exception
    return RuntimeError(failure.message)
