"""The trackers that a user gives a run: by their short names, or among the observers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import polytrain.trackers
from polytrain.trackers import NAMES
from polytrain.trackers.tracker import Tracker
from polytrain_plugins import Problem
from polytrain_plugins.close_names import did_you_mean
from polytrain_plugins.type_names import a_type


def tracker_class(name: str) -> type[Tracker]:
    """Return the class of a tracker by its short name.

    Raises:
        KeyError: there is none of this name.
    """
    found: type[Tracker] = getattr(polytrain.trackers, NAMES[name])
    return found


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
    unknown = [name for name in names or () if name not in NAMES]
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
