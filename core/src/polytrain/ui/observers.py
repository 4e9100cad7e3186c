"""Calls observers. An observer that raises is logged and not called again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from importlib.metadata import entry_points
from typing import Any

import pluggy

from polytrain.ui.observer_checks import observer_problems
from polytrain_plugins import Attempt, CheckpointInfo, Outcome, Report, RunInfo, Stopped
from polytrain_plugins.hookspecs import PROJECT, ObserverHooks

GROUP = "polytrain.observers"

logger = logging.getLogger(__name__)


class Observers:
    """The observers of one run, called through typed methods."""

    def __init__(
        self,
        observers: Iterable[Any] = (),
        *,
        stop: Callable[[Stopped], None] = lambda stopped: None,
    ) -> None:
        """
        Args:
            observers: objects with hooks.
            stop: called if one of them stops the run.
        """
        self._stop = stop
        # One manager for each run: concurrent runs don't share observers.
        self._manager = pluggy.PluginManager(PROJECT)
        self._manager.add_hookspecs(ObserverHooks)
        for observer in observers:
            self._manager.register(observer)
        # A hook with a misspelt name would otherwise never be called.
        self._manager.check_pending()

    def run_started(self, run: RunInfo) -> None:
        self._tell("polytrain_run_started", run=run)

    def attempt_started(self, run: RunInfo, attempt: Attempt) -> None:
        self._tell("polytrain_attempt_started", run=run, attempt=attempt)

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
        self._tell("polytrain_attempt_ended", run=run, attempt=attempt, outcome=outcome)

    def run_ended(self, run: RunInfo, outcome: Outcome) -> None:
        self._tell("polytrain_run_ended", run=run, outcome=outcome)

    def _tell(self, hook: str, **arguments: Any) -> None:
        # pluggy's own call would stop at the first exception, and skip the other observers.
        for implementation in getattr(self._manager.hook, hook).get_hookimpls():
            known = {**arguments, "stop": partial(self._stopped_by, implementation.plugin)}
            wanted = {name: known[name] for name in implementation.argnames}
            try:
                implementation.function(**wanted)
            except Exception:
                logger.exception(
                    "The observer %r raised in %s and is not called again; the run continues.",
                    implementation.plugin_name,
                    hook,
                )
                self._manager.unregister(implementation.plugin)

    def _stopped_by(self, observer: Any, reason: str = "") -> None:
        name = type(observer).__name__
        why = f"{name}: {reason}" if reason else name
        self._stop(Stopped(by="observer", reason=why))


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
