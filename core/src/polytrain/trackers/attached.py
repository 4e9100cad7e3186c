"""Attaches trackers and exporters to a run, to follow its record while it lasts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from polytrain.record.entries import Entry
from polytrain.record.journal import Take
from polytrain.record.ledger import Ledger
from polytrain.run.run import Run
from polytrain.storage.location import Location
from polytrain.trackers import NAMES
from polytrain.trackers.delivery import TrackedFacts
from polytrain.trackers.prometheus import Prometheus, exposed
from polytrain.trackers.tracker import Tracker, tracker_class
from polytrain.trackers.tracking import Tracking
from polytrain_plugins import Problem
from polytrain_plugins.close_names import did_you_mean
from polytrain_plugins.type_names import a_type


def place_problems(track: Any, observers: Any, location: Location) -> Iterator[Problem]:
    """Yield the problems of a run's trackers with the run's location.

    Args:
        track: `RunConfig.track`.
        observers: `RunConfig.observers`.
    """
    for tracker in trackers_of(track, observers):
        yield from tracker.place_problems(location.address, is_directory=location.is_local)


@contextlib.contextmanager
def followed(run: Run, ledger: Ledger, is_urgent: Callable[[], bool]) -> Iterator[Take]:
    """Send a run to its trackers, and expose it; yield a function for each entry of its journal.

    Args:
        ledger: the journal's ledger, which gets each entry before the function does.
        is_urgent: returns whether the program wants to end without waiting for trackers.
    """
    own = run.lease.token
    facts = TrackedFacts(
        location=run.location,
        since=own if run.past is None else run.past.since_token,
    )
    config = run.spec.run_config
    exporters = [
        exposed(each, run.info, ledger, run.lease.clock)
        for each in config.observers
        if isinstance(each, Prometheus)
    ]
    with Tracking(
        trackers_of(config.track, config.observers),
        facts,
        own_token=own,
        check_lease=run.lease.check,
        is_urgent=is_urgent,
    ) as tracking:

        def take(entry: Entry) -> None:
            tracking.follow(entry)
            for expose in exporters:
                expose(entry)

        yield take


def trackers_of(track: Any, observers: Any) -> tuple[Tracker, ...]:
    """Return a run's trackers: those named by `track`, and those among its observers."""
    return tuple(each.resolved() for each in _given(track, observers))


def _given(track: Any, observers: Any) -> list[Tracker]:
    names = (track,) if isinstance(track, str) else (track or ())
    named = [tracker_class(name)() for name in names]
    return [*named, *(each for each in observers if isinstance(each, Tracker))]


def tracker_problems(track: Any, observers: Any) -> Iterator[Problem]:
    """Yield the problems of a run's trackers.

    Args:
        track: what the user passed as `RunConfig.track`.
        observers: what the user passed as `RunConfig.observers`.
    """
    names = (track,) if isinstance(track, str) else track
    if not isinstance(names, tuple | list | None):
        yield Problem(
            field="RunConfig.track",
            what=f"it is {a_type(track)}",
            remedy=f"Give one of {', '.join(map(repr, NAMES))}, or several in a tuple",
        )
        return
    unknown = [name for name in names or () if not isinstance(name, str) or name not in NAMES]
    for name in unknown:
        what = f"{name!r} is not a tracker"
        meant = did_you_mean(name, NAMES) if isinstance(name, str) else ""
        if isinstance(name, Tracker):
            what = f"{name!r} is a tracker, not a name"
            meant = "Pass it in RunConfig(observers=[…]). "
        yield Problem(
            field="RunConfig.track",
            what=what,
            remedy=f"{meant}There are: {', '.join(map(repr, NAMES))}",
        )
    if unknown or not isinstance(observers, tuple | list):
        return
    given = _given(names, observers)
    problems = dict.fromkeys(problem for tracker in given for problem in tracker.problems())
    yield from problems
    resolved = [] if problems else [tracker.resolved() for tracker in given]
    for place, tracker in enumerate(resolved):
        if tracker in resolved[:place]:
            yield Problem(
                field="RunConfig.track",
                what=f"{tracker!r} is given twice",
                remedy="Leave one of them out",
            )
