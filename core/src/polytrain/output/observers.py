"""Calls observers, each on a thread of its own. One that raises is logged and not called again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from importlib.metadata import entry_points
from typing import Any

import pluggy
from pluggy import HookImpl

from polytrain.output.call_queues import CallQueues
from polytrain.output.observer_checks import observer_problems
from polytrain_plugins import Attempt, CheckpointInfo, Outcome, Report, RunInfo, Stopped
from polytrain_plugins.hookspecs import PROJECT, ObserverHooks

GROUP = "polytrain.observers"

_EVENT_SIZE = 1000
"""Bytes that an event which waits for an observer is counted with."""

_ATTEMPT_WAITS_S = 1.0
"""Seconds that the start and the end of an attempt wait for observers."""

END_WITHIN_S = 60.0
"""Seconds that the end of a run waits for its observers."""

logger = logging.getLogger(__name__)


class Observers:
    """The observers of one run, called through typed methods."""

    def __init__(
        self,
        observers: Iterable[Any] = (),
        *,
        stop: Callable[[Stopped], None] = lambda stopped: None,
        queues: CallQueues | None = None,
        at_once: Collection[Any] = (),
    ) -> None:
        """
        Args:
            observers: objects with hooks.
            stop: called if one of them stops the run.
            queues: call them, so that nobody waits for an observer; by default they are called at
                once.
            at_once: those of them that are called at once in any case.
        """
        self._queues = CallQueues(at_once=True) if queues is None else queues
        self._at_once = CallQueues(at_once=True)
        self._quick = {id(observer) for observer in at_once}
        self._broken: set[int] = set()
        self._stop = stop
        # One manager for each run: concurrent runs don't share observers.
        self._manager = pluggy.PluginManager(PROJECT)
        self._manager.add_hookspecs(ObserverHooks)
        self._observers = list(observers)
        for observer in self._observers:
            self._manager.register(observer)
        # A hook with a misspelt name would otherwise never be called.
        self._manager.check_pending()

    def run_started(self, run: RunInfo) -> None:
        self._tell("polytrain_run_started", run=run)

    def attempt_started(self, run: RunInfo, attempt: Attempt) -> None:
        """Tell all observers, and wait a moment for them: processes start after this."""
        self._tell("polytrain_attempt_started", run=run, attempt=attempt)
        self._wait_a_moment()

    def reported(self, run: RunInfo, report: Report) -> None:
        self._tell("polytrain_reported", run=run, report=report)

    @property
    def want_every_rank(self) -> bool:
        """Whether any of them wants the reports of ranks above 0."""
        return bool(self._manager.hook.polytrain_rank_reported.get_hookimpls())

    def rank_reported(self, run: RunInfo, report: Report) -> None:
        self._tell("polytrain_rank_reported", run=run, report=report)

    def checkpoint_committed(self, run: RunInfo, checkpoint: CheckpointInfo) -> None:
        self._tell("polytrain_checkpoint_committed", run=run, checkpoint=checkpoint)

    def checkpoint_validated(self, run: RunInfo, checkpoint: CheckpointInfo) -> None:
        self._tell("polytrain_checkpoint_validated", run=run, checkpoint=checkpoint)

    def attempt_ended(self, run: RunInfo, attempt: Attempt, outcome: Outcome) -> None:
        """Tell all observers, and wait a moment for them: the next attempt starts after this."""
        self._tell("polytrain_attempt_ended", run=run, attempt=attempt, outcome=outcome)
        self._wait_a_moment()

    def run_ended(self, run: RunInfo, outcome: Outcome) -> None:
        self._tell("polytrain_run_ended", run=run, outcome=outcome)

    def finish(self) -> None:
        """Wait until the observers have taken all events, for a limited time."""
        for observer in self._queues.unfinished(self._observers, within_s=END_WITHIN_S):
            logger.warning(
                "The observer %r hasn't taken all events within %g s of the run's end. It gets the "
                "others for as long as this program runs.",
                _name(observer),
                END_WITHIN_S,
            )

    def _wait_a_moment(self) -> None:
        self._queues.unfinished(self._observers, within_s=_ATTEMPT_WAITS_S)

    def _tell(self, hook: str, **arguments: Any) -> None:
        # pluggy's own call would stop at the first exception, and skip the other observers.
        for implementation in getattr(self._manager.hook, hook).get_hookimpls():
            observer = implementation.plugin
            known = {**arguments, "stop": partial(self._stopped_by, observer)}
            wanted = {name: known[name] for name in implementation.argnames}
            queues = self._at_once if id(observer) in self._quick else self._queues
            queue = queues.of(observer, left_out=partial(_warn_of_events, observer))
            queue.give(partial(self._call, implementation, hook, wanted), size=_EVENT_SIZE)

    def _call(self, implementation: HookImpl, hook: str, arguments: Mapping[str, Any]) -> None:
        if id(implementation.plugin) in self._broken:
            return
        try:
            implementation.function(**arguments)
        except Exception:
            logger.exception(
                "The observer %r raised in %s and is not called again; the run continues.",
                _name(implementation.plugin),
                hook,
            )
            self._broken.add(id(implementation.plugin))

    def _stopped_by(self, observer: Any, reason: str = "") -> None:
        name = _name(observer)
        why = f"{name}: {reason}" if reason else name
        self._stop(Stopped(by="observer", reason=why))


def _name(observer: Any) -> str:
    """An observer may be a module, too."""
    return str(getattr(observer, "__name__", type(observer).__name__))


def _warn_of_events(observer: Any, count: int) -> None:
    logger.warning(
        "The observer %r is slower than the run, and misses %d events. The run continues.",
        _name(observer),
        count,
    )


def installed_observers() -> list[Any]:
    """The observers of installed distributions. One that can't be used is logged."""
    found = []
    for entry_point in entry_points(group=GROUP):
        try:
            observer = entry_point.load()
        except Exception:
            logger.exception("The observer %r can't be imported. It is ignored.", entry_point.name)
            continue
        problems = list(observer_problems(observer, entry_point.name))
        if problems:
            wrong = "; ".join(f"{problem.field}: {problem.what}" for problem in problems)
            logger.error("The observer %r is ignored: %s.", entry_point.name, wrong)
        else:
            found.append(observer)
    return found
