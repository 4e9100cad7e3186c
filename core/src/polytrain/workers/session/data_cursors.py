"""Tracks a worker process's positions in its data, which its checkpoints keep."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from polytrain.events.notices import Skipped
from polytrain.policy.divergence import DataPlace

if TYPE_CHECKING:
    from polytrain.data.plan.cursor import Cursor
    from polytrain.data.plan.position import DataPosition
    from polytrain.data.plan.row_plan import Plan
    from polytrain.data.shards.shard import BatchedShard


logger = logging.getLogger(__name__)

_AMBIGUOUS = (
    "%r: a checkpoint was reported while an iterator over it was still there, which was then "
    "given up before its end. A restart from such a checkpoint reads the rest of that epoch, and "
    "not the next one. Report after the loop, and keep the iterator in no variable: write "
    "`for batch in …` or `for a, b in zip(…)`, or delete it before the report."
)

_LOOKED = (
    "%r: a loop over it was left after %d batch(es), and nothing was reported until the next loop "
    "began. It counts as epoch %d: all later epochs have another order than without it. To look at "
    'rows, pass the data under another name too: datasets={"train": data, "look": data}.'
)


class DataCursors:
    """The cursors of a rank, in its shards and in data that the training function brings."""

    def __init__(
        self,
        shards: Mapping[str, BatchedShard],
        *,
        saved: Mapping[str, Mapping[str, Any]],
        skipped: Mapping[str, Sequence[Skipped]],
    ) -> None:
        """
        Args:
            shards: this rank's shards, by name.
            saved: positions in the attempt's starting checkpoint, by name.
        """
        self._cursors: dict[str, Cursor[Any]] = {
            name: shard.cursor for name, shard in shards.items()
        }
        self._saved = saved
        self._skipped = skipped
        self._unnamed = 0
        self._named: set[str] = set()
        """The data sets that a warning has named."""

        self._looked_at: set[str] = set()
        """Those that a warning of a look has named."""

    def open(self, plan: Plan, name: str | None) -> Cursor[DataPosition]:
        """Open a position in data that the training function brings; see `worker_api.cursor`."""
        from polytrain.data.plan.cursor import Cursor
        from polytrain.data.plan.position import DataPosition

        if name is None:
            # Number it: a training function makes the same calls in every attempt.
            name = f"data loader {self._unnamed}"
            # Give loaders with the same seed different orders.
            plan = replace(plan, seed=plan.seed + self._unnamed)
            self._unnamed += 1
        position = self._saved.get(name)
        earlier = self._cursors.get(name)
        if earlier is not None:
            # A second loader of this name begins with the epoch after the first one's.
            next_epoch = earlier.next_epoch()
            position = earlier.position.moved(next_epoch.number, next_epoch.start).to_plain()
        if position is not None:
            # Keep the seed, which was drawn at random, and the number of shards, which was that of
            # the workers, from the run's first attempt.
            first = position["plan"]
            plan = replace(plan, seed=first["seed"], shards=first["shards"])
        resumed = DataPosition.resume(name, position, plan, {})
        self._cursors[name] = cursor = Cursor(
            resumed,
            skipped=self._skipped.get(name, ()),
            resumes=earlier.may_be_looked_at if earlier is not None else position is not None,
        )
        return cursor

    def reported(self) -> None:
        """Note that the training function has reported."""
        for name, cursor in self._cursors.items():
            look = cursor.look
            if look is not None and name not in self._looked_at and _shuffles(cursor):
                self._looked_at.add(name)
                logger.warning(_LOOKED, name, look.batches, look.number)
            cursor.reported()

    def training_begins(self) -> list[str]:
        """Note that the training takes its first step; return the data that it has read before."""
        self.reported()
        return [
            name for name, cursor in self._cursors.items() if cursor.is_under_way and cursor.passes
        ]

    def places(self) -> dict[str, DataPlace]:
        """Return the places in the data by name, for each report: in numbers alone."""
        return {name: _place(cursor) for name, cursor in self._cursors.items()}

    def held(self) -> dict[str, Any]:
        """Return the positions, which don't change any more, by name."""
        return {name: cursor.position for name, cursor in self._cursors.items()}

    def recorded(self) -> dict[str, Any]:
        """Return the positions as plain values, by name, for a checkpoint that is made now.

        Data that wasn't read is left out.
        """
        positions = {name: cursor.recorded() for name, cursor in self._cursors.items()}
        for name, cursor in self._cursors.items():
            if cursor.is_ambiguous and name not in self._named:
                self._named.add(name)
                logger.warning(_AMBIGUOUS, name)
        return {
            name: position.to_plain()
            for name, position in positions.items()
            if not position.is_beginning
        }


def _shuffles(cursor: Cursor[Any]) -> bool:
    """Return whether the order of rows differs between epochs; False if it is unknown."""
    # A stream's position has no plan.
    return cursor.skips and bool(cursor.position.plan.shuffle or cursor.position.plan.mix)


def _place(cursor: Cursor[Any]) -> DataPlace:
    position = cursor.position
    # A stream's rows have no numbers, and it has no end that is known.
    rows = position.plan.rows if cursor.skips else 2**62
    place, past = (position.epoch, position.start), cursor.looked_past
    since = (0, 0) if past is None else (past.epoch, past.start)
    return DataPlace(place=place, rows=rows, skips=cursor.skips, since=since)
