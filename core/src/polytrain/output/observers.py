"""Checks observers, and calls each on its own thread.

An observer that raises is logged and not called again.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pluggy

from polytrain.config.loop_config import name_of
from polytrain.functions.function_checks import deferred_problems
from polytrain.output.call_queues import CallQueues, GuardedCalls
from polytrain.text.metrics import copied
from polytrain_plugins import Attempt, CheckpointInfo, Outcome, Problem, Report, RunInfo, Stopped
from polytrain_plugins.close_names import did_you_mean
from polytrain_plugins.hookspecs import PROJECT, ObserverHooks
from polytrain_plugins.installed import installed_entry_points
from polytrain_plugins.type_names import a_type, quoted

GROUP = "polytrain.observers"

_ATTEMPT_WAITS_S = 1.0
"""Seconds that the start and the end of an attempt wait for observers."""

END_WITHIN_S = 60.0
"""Seconds that the end of a run waits for its observers."""

_FIELD = "RunConfig.observers"
_PREFIX = "polytrain_"
_MARK = f"{PROJECT}_impl"
"""The attribute that pluggy's marker, `hookimpl`, sets on a function."""

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
            stop: called if an observer stops the run.
            queues: queues for the calls, so that nobody waits for an observer; by default they are
                called directly.
            at_once: observers that are called directly in any case.
        """
        self._queues = CallQueues(at_once=True) if queues is None else queues
        self._calls = GuardedCalls("observer", self._queues)
        self._at_once = CallQueues(at_once=True)
        self._quick = {id(observer) for observer in at_once}
        self._stop = stop
        # One that is installed may also be passed.
        self._observers = list({id(each): each for each in observers}.values())
        self._managers = [_manager_of(observer) for observer in self._observers]

    def run_started(self, run: RunInfo) -> None:
        self._tell("polytrain_run_started", run=run)

    def attempt_started(self, run: RunInfo, attempt: Attempt) -> None:
        """Notify all observers, and wait briefly for them: processes start after this."""
        self._tell("polytrain_attempt_started", run=run, attempt=attempt)
        self._wait_a_moment()

    def reported(self, run: RunInfo, report: Report) -> None:
        self._tell("polytrain_reported", run=run, report=report)

    @property
    def want_every_rank(self) -> bool:
        """Whether any of them wants the reports of ranks above 0."""
        return any(self._implementations("polytrain_rank_reported"))

    def rank_reported(self, run: RunInfo, report: Report) -> None:
        self._tell("polytrain_rank_reported", run=run, report=report)

    def checkpoint_committed(self, run: RunInfo, checkpoint: CheckpointInfo) -> None:
        self._tell("polytrain_checkpoint_committed", run=run, checkpoint=checkpoint)

    def checkpoint_validated(self, run: RunInfo, checkpoint: CheckpointInfo) -> None:
        self._tell("polytrain_checkpoint_validated", run=run, checkpoint=checkpoint)

    def attempt_ended(self, run: RunInfo, attempt: Attempt, outcome: Outcome) -> None:
        """Notify all observers, and wait briefly for them: the next attempt starts after this."""
        self._tell("polytrain_attempt_ended", run=run, attempt=attempt, outcome=outcome)
        self._wait_a_moment()

    def run_ended(self, run: RunInfo, outcome: Outcome) -> None:
        self._tell("polytrain_run_ended", run=run, outcome=outcome)

    def finish(self) -> None:
        """Wait until the observers have handled all events, for a limited time."""
        self._calls.finish(self._observers, within_s=END_WITHIN_S)

    def _wait_a_moment(self) -> None:
        self._queues.unfinished(self._observers, within_s=_ATTEMPT_WAITS_S)

    def _tell(self, hook: str, **arguments: Any) -> None:
        # pluggy's own call would stop at the first exception, and skip the other observers.
        for implementation in self._implementations(hook):
            observer = implementation.plugin
            known = {**arguments, "stop": partial(self._stopped_by, observer)}
            wanted = {name: known[name] for name in implementation.argnames}
            self._calls.submit(
                observer,
                hook,
                partial(_call, implementation.function, wanted),
                queues=self._at_once if id(observer) in self._quick else None,
            )

    def _implementations(self, hook: str) -> Iterator[Any]:
        for manager in self._managers:
            yield from getattr(manager.hook, hook).get_hookimpls()

    def _stopped_by(self, observer: Any, reason: str = "") -> None:
        name = name_of(observer)
        why = f"{name}: {reason}" if reason else name
        self._stop(Stopped(by="observer", reason=why))


def _call(hook: Callable[..., None], arguments: Mapping[str, Any]) -> None:
    """Call a hook, with metrics of its own."""
    own = {
        name: replace(each, metrics=copied(each.metrics))
        if isinstance(each, Report | CheckpointInfo)
        else each
        for name, each in arguments.items()
    }
    hook(**own)


def _manager_of(observer: Any) -> pluggy.PluginManager:
    """Return a manager of this observer alone: one of several refuses equal objects."""
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(ObserverHooks)
    manager.register(observer)
    # A hook with a misspelt name would otherwise never be called.
    manager.check_pending()
    return manager


def installed_observers() -> list[Any]:
    """Return the observers of installed distributions, and log those that can't be used."""
    found = []
    for entry_point in installed_entry_points(GROUP):
        try:
            observer = entry_point.load()
        except (Exception, SystemExit):
            logger.exception("The observer %r can't be imported. It is ignored.", entry_point.name)
            continue
        problems = list(observer_problems(observer, entry_point.name))
        if problems:
            wrong = "; ".join(map(str, problems))
            logger.error("The observer %r is ignored: %s.", entry_point.name, wrong)
        else:
            found.append(observer)
    return found


class RecordFollower:
    """An observer to which a satellite passes the run's record. It may have no hooks."""

    __slots__ = ()


def is_called(observer: Any) -> bool:
    """Return whether an observer has hooks to call, and doesn't only follow the record."""
    kind = type(observer)
    marked = (hasattr(getattr(kind, name, None), _MARK) for name in dir(kind))
    return not isinstance(observer, RecordFollower) or any(marked)


def follow_record(track: Any, observers: Any) -> bool:
    """Return whether trackers or exporters follow a run.

    Args:
        track: what the user passed as `RunConfig.track`.
        observers: what the user passed as `RunConfig.observers`.
    """
    given = observers if isinstance(observers, tuple | list) else ()
    is_tracked = track is not None and track != ()
    return is_tracked or any(isinstance(each, RecordFollower) for each in given)


def observers_problems(observers: Any) -> Iterator[Problem]:
    """Yield the problems of a run's observers.

    Args:
        observers: what the user passed as `RunConfig.observers`.
    """
    if not isinstance(observers, tuple | list):
        yield Problem(
            field=_FIELD,
            what=f"it is {a_type(observers)}",
            remedy="Give a list of observers, also for one: observers=[…]",
        )
        return
    for place, observer in enumerate(observers):
        field = f"{_FIELD}[{place}]"
        if any(observer is earlier for earlier in observers[:place]):
            yield Problem(field=field, what="it is given twice", remedy="Leave one of them out")
        elif is_called(observer):
            yield from observer_problems(observer, field)


def observer_problems(observer: Any, field: str) -> Iterator[Problem]:
    """Yield the problems of one observer."""
    if inspect.isclass(observer):
        name = observer.__name__
        yield Problem(field=field, what=f"it is the class {name}", remedy=f"Give {name}(…)")
        return
    if isinstance(observer, str):
        remedy = "Give an object with hooks; names of trackers belong in RunConfig(track=…)"
        yield Problem(field=field, what=f"{quoted(observer)} is text", remedy=remedy)
        return
    methods = dict(_methods(observer))
    marked = {name: method for name, method in methods.items() if hasattr(method, _MARK)}
    for name in methods.keys() & _hooks().keys() - marked.keys():
        yield Problem(
            field=f"{field}.{name}",
            what="it isn't marked as a hook, and would never be called",
            remedy="Write @hookimpl above it, from `from polytrain_plugins import hookimpl`",
        )
    for name, method in marked.items():
        yield from _hook_problems(f"{field}.{name}", name, method)
    if not marked and not methods.keys() & _hooks().keys():
        yield Problem(
            field=field,
            what=f"{a_type(observer)} has no hook",
            remedy=f"Give it a method with @hookimpl above it: {', '.join(_hooks())}",
        )


def _hook_problems(field: str, name: str, method: Callable[..., Any]) -> Iterator[Problem]:
    hooks = _hooks()
    if name not in hooks:
        yield Problem(
            field=field,
            what="there is no such hook",
            remedy=f"{did_you_mean(name, hooks)}There are: {', '.join(hooks)}",
        )
        return
    for parameter in inspect.signature(method).parameters:
        if parameter not in hooks[name]:
            yield Problem(
                field=field,
                what=f"the hook has no argument {parameter!r}",
                remedy=f"It may take any of: {', '.join(hooks[name])}",
            )
    yield from deferred_problems(field, method, effect="and does nothing")


def _hooks() -> dict[str, list[str]]:
    """Return the arguments of each hook, by its name."""
    specs = {k: v for k, v in vars(ObserverHooks).items() if k.startswith(_PREFIX)}
    return {name: list(inspect.signature(spec).parameters)[1:] for name, spec in specs.items()}


def _methods(observer: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    for name in dir(observer):
        # A property may do anything when it is read.
        if not isinstance(getattr(type(observer), name, None), property):
            method = getattr(observer, name, None)
            if inspect.isroutine(method):
                yield name, method
