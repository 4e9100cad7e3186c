"""Finds the runs that a path without a run may mean: those in it, and similar names beside it."""

from __future__ import annotations

import os
from pathlib import Path

from polytrain.record.history import JOURNAL
from polytrain.storage.location import Location
from polytrain.text.first_few import first_few
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
    """Return the runs beside a location whose names are similar, the most similar first."""
    return close_to(location.name, names_inside(location.parent))


def listed(paths: list[str]) -> str:
    """Return the first few paths as a list."""
    return first_few(paths, _SHOWN)


def no_run_text(location: Location) -> str:
    """Return why a location isn't a run, and what may be meant."""
    text = f"There is no run in {location.address}: it has no {JOURNAL}. "
    inside = [location.below(name).address for name in names_inside(location)]
    if inside:
        return f"{text}It is a storage. Pass one of its runs: {listed(inside)}."
    near = names_near(location)
    if near:
        return f"{text}Did you mean {location.parent.below(near[0]).address}?"
    return f"{text}Pass the run's own directory, storage_path/name."


def _printable_runs(directory: Path) -> list[str]:
    try:
        return [name for name in runs_in(directory) if name.isprintable()]
    except OSError:
        return []
