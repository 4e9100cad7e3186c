"""Positions in the data of a worker process, which its checkpoints keep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polytrain.data.plan.cursor import Cursor
    from polytrain.data.plan.position import DataPosition
    from polytrain.data.plan.row_plan import Plan
    from polytrain.data.shards.shard import BatchedShard


class DataCursors:
    """The cursors of a rank: of its shards, and of data that the training function brings."""

    def __init__(
        self, shards: Mapping[str, BatchedShard], *, saved: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """
        Args:
            shards: this rank's shards, by name.
            saved: positions of the checkpoint that the attempt started from, by name.
        """
        self._cursors: dict[str, Cursor[Any]] = {
            name: shard.cursor for name, shard in shards.items()
        }
        self._saved = saved
        self._unnamed = 0

    def open(self, plan: Plan, name: str | None) -> Cursor[DataPosition]:
        """Open a position in data that the training function brings; see `worker_api.cursor`."""
        from polytrain.data.plan.cursor import Cursor
        from polytrain.data.plan.position import DataPosition

        if name is None:
            # The number identifies it: a training function makes the same calls in every attempt.
            name = f"data loader {self._unnamed}"
            # Loaders with the same seed get different orders.
            plan = replace(plan, seed=plan.seed + self._unnamed)
            self._unnamed += 1
        position = self._saved.get(name)
        earlier = self._cursors.get(name)
        if earlier is not None:
            # A second loader of that name begins with the epoch after the first one's.
            next_epoch = earlier.next_epoch()
            position = earlier.position.moved(next_epoch.number, next_epoch.start).to_plain()
        if position is not None:
            # The seed is drawn from the process's random numbers, and the data is cut for the
            # number of workers: those of the run's first attempt count.
            first = position["plan"]
            plan = replace(plan, seed=first["seed"], shards=first["shards"])
        self._cursors[name] = cursor = Cursor(DataPosition.resume(name, position, plan, {}))
        return cursor

    def positions(self) -> dict[str, Any]:
        """Return the positions as plain values, by name; none of data that wasn't read yet."""
        return {
            name: cursor.position.to_plain()
            for name, cursor in self._cursors.items()
            if not cursor.position.is_beginning
        }
