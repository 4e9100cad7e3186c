"""The trackers by their short names, as `RunConfig.track` takes them."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

from polytrain.common.close_names import close_to
from polytrain.trackers.tracker import Tracker
from polytrain_plugins import Problem

NAMES = {
    "csv": "CSV",
    "jsonl": "JSONLines",
}


def tracker_class(name: str) -> type[Tracker]:
    """Return the class of a tracker.

    Raises:
        KeyError: there is none of this name.
    """
    found: type[Tracker] = getattr(import_module("polytrain.trackers"), NAMES[name])
    return found


def trackers_of(track: Any, observers: Any) -> tuple[Tracker, ...]:
    """Return a run's trackers: those named by `track`, and those among its observers."""
    names = (track,) if isinstance(track, str) else (track or ())
    named = [tracker_class(name)() for name in names]
    given = [each for each in observers if isinstance(each, Tracker)]
    return tuple(each.resolved() for each in (*named, *given))


def tracker_problems(track: Any, observers: Any) -> Iterator[Problem]:
    """Yield what is wrong with a run's trackers.

    Args:
        track: what the user passed as `RunConfig.track`.
        observers: what the user passed as `RunConfig.observers`.
    """
    names = (track,) if isinstance(track, str) else track
    if not isinstance(names, tuple | list | None):
        yield Problem(
            field="RunConfig.track",
            what=f"it is a {type(track).__name__}",
            remedy=f"Give one of {', '.join(map(repr, NAMES))}, or several in a tuple",
        )
        return
    unknown = [name for name in names or () if name not in NAMES]
    for name in unknown:
        near = close_to(name, list(NAMES)) if isinstance(name, str) else ()
        meant = f"Did you mean {near[0]!r}? " if near else ""
        yield Problem(
            field="RunConfig.track",
            what=f"{name!r} is not a tracker",
            remedy=f"{meant}There are: {', '.join(map(repr, NAMES))}",
        )
    if unknown or not isinstance(observers, tuple | list):
        return
    seen: list[Tracker] = []
    for tracker in trackers_of(names, observers):
        if tracker in seen:
            yield Problem(
                field="RunConfig.track",
                what=f"{tracker!r} is given twice",
                remedy="Leave one of them out",
            )
        else:
            seen.append(tracker)
            yield from tracker.problems()
