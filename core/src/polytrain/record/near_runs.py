"""Finds the runs that a path without a run may mean: those in it, and similar names beside it."""

from __future__ import annotations

import os
from pathlib import Path

from polytrain.record.history import JOURNAL
from polytrain.storage import DEFAULT_STORAGE
from polytrain.storage.location import Location
from polytrain.text.described import first_few
from polytrain_plugins.close_names import close_to

_SHOWN = 3


def runs_in(directory: Path) -> list[str]:
    """Return the names of the directories that have a journal; each may be a link to a run.

    Raises:
        OSError: the directory can't be read.
    """
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    return sorted(name for name in names if os.path.lexists(directory / name / JOURNAL))


def names_inside(location: Location) -> list[str]:
    """Return the names of the runs in a location; none of object storage, where it takes long."""
    return _printable_runs(Path(location.address)) if location.is_local else []


def names_near(location: Location) -> list[str]:
    """Return the other runs beside a location with similar names, the most similar first."""
    others = [name for name in names_inside(location.parent) if name != location.name]
    return close_to(location.name, others)


def has_damaged_journal(location: Location) -> bool:
    """Return whether a location in which no run is found has a journal all the same."""
    return location.is_local and os.path.lexists(Path(location.address, JOURNAL))


def damaged_journal_text(location: Location) -> str:
    """Return what is wrong with such a location."""
    return (
        f"The run in {location.address} can't be read: its {JOURNAL} is empty or damaged. "
        "Its checkpoints, if it has any, are in the directory checkpoints: "
        "polytrain.Checkpoint.from_directory(…) reads one."
    )


def listed(paths: list[str]) -> str:
    """Return the first few paths as a list."""
    return first_few(paths, _SHOWN)


def no_run_text(location: Location) -> str:
    """Return why a location isn't a run, and what may be meant."""
    if has_damaged_journal(location):
        return damaged_journal_text(location)
    text = f"There is no run in {location.address}: it has no {JOURNAL}. "
    inside = [location.below(name).address for name in names_inside(location)]
    if inside:
        return f"{text}It is a storage. Pass one of its runs: {listed(inside)}."
    usual = Location.of(DEFAULT_STORAGE)
    if location.name in names_inside(usual):
        return f"{text}Did you mean {usual.below(location.name).address}?"
    near = names_near(location)
    if near:
        return f"{text}Did you mean {location.parent.below(near[0]).address}?"
    return f"{text}Pass the run's own directory, storage_path/name."


def _printable_runs(directory: Path) -> list[str]:
    try:
        return [name for name in runs_in(directory) if name.isprintable()]
    except OSError:
        return []
