"""Measures how far a run's trackers lag behind it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from polytrain.record.entries import Entry
from polytrain.storage.protocol import Storage
from polytrain.trackers.rows import TrackedRows
from polytrain.trackers.state import kept_states


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerLag:
    """The lag of one tracker of a run."""

    name: str
    step: int
    """The last step that it is known to have, noted every few seconds by an active run."""

    lacks: int
    """Number of later steps that are ready for it. MLflow and W&B get a step once no restart can
    undo it: see `TrackedRows`."""


def lags(storage: Storage, journal: Iterable[Entry], *, since: int) -> tuple[TrackerLag, ...]:
    """Read the lag of each tracker.

    Args:
        storage: the run's storage.
        journal: the entries of its journal.
        since: fencing token of the driver that started the run, or started it over.

    Raises:
        OSError: the storage can't be read.
        ValueError: the state of a tracker is damaged, or of a newer version.
    """
    found = {
        # Positions from before the run was started over don't count.
        (file, state.tracker): TrackedRows(state.started_at(since), can_rewind=kind.can_rewind)
        for file, state, kind in kept_states(storage)
    }
    if not found:
        return ()
    for entry in journal:
        if entry.token >= since:
            for rows in found.values():
                rows.take(entry)
    return tuple(
        TrackerLag(name=name, step=rows.sent, lacks=rows.ready) for (_, name), rows in found.items()
    )
