"""Data sets of a run as all its workers know them: order, division, and who holds the rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from polytrain.data.plan.row_plan import Plan, Remainder
from polytrain.data.read.pieces import Piece
from polytrain.data.read.transforms import RandomTransform
from polytrain_plugins import virtual_workers_of


class Held(StrEnum):
    """The rows that a rank's agent holds in memory, which its worker processes map."""

    NOTHING = "nothing"
    """Worker processes read the pieces themselves, a few at a time."""

    SHARE = "its share"
    """The rank's share as a whole; there are no batches."""

    SHARDS = "its canonical shards"
    """All rows from which the rank's batches may come."""

    ALL = "all rows"
    """The node's object store has them, once for all agents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSpec:
    """A data set that a plan divides: the same for every rank and attempt of a run."""

    name: str
    num_rows: int
    """Rows of an epoch."""

    schema: pa.Schema
    """Schema of the rows that are read, before `transform`."""

    plan: Plan
    remainder: Remainder
    held: Held

    pieces: tuple[Piece, ...] = ()
    """The pieces that worker processes read, if agents hold nothing."""

    digests: Mapping[str, str] = field(default_factory=dict)
    """The data set's: see `fingerprint.digests`."""

    transform: RandomTransform | None = None
    """Applied to batches."""

    whole: bool = False
    """Every rank gets all rows."""

    group_starts: np.ndarray[Any, Any] | None = None
    """With groups: the first row of each, and the number of rows after the last. The plan then
    counts groups."""

    virtual_workers: int | None = None
    """With virtual workers: their number. Batches are divided among these."""

    def places(self, world_size: int, rank: int) -> tuple[int, range]:
        """The number of parts into which this data set is divided, and which are a rank's."""
        if self.whole:
            return 1, range(1)
        if self.virtual_workers is None:
            return world_size, range(rank, rank + 1)
        return self.virtual_workers, virtual_workers_of(self.virtual_workers, world_size, rank)

    def share(self, world_size: int, rank: int) -> range:
        """The rows of a rank's shard as a whole."""
        return self._rows_of(self._items(self.plan.share, world_size, rank))

    def held_rows(self, world_size: int, rank: int) -> range:
        """The rows that the rank's agent holds."""
        match self.held:
            case Held.ALL:
                mix = self.plan.mix
                return range(self.num_rows if mix is None else mix.all_rows)
            case Held.SHARDS:
                return self._rows_of(self._items(self.plan.reach, world_size, rank))
            case Held.SHARE:
                return self.share(world_size, rank)
        return range(0)

    def read_amplification(self, world_size: int) -> float:
        """Rows read / rows used, of the rank for which this is highest."""
        is_anywhere = all(piece.seekable(scattered=True) for piece in self.pieces)
        if self.held in (Held.ALL, Held.SHARE) or (self.held is Held.NOTHING and is_anywhere):
            return 1.0
        world_size = 1 if self.whole else world_size
        reaches = (self._items(self.plan.reach, world_size, rank) for rank in range(world_size))
        return max(map(len, reaches)) * world_size / self.plan.rows

    def _items(self, of: Callable[[int, int], range], world_size: int, rank: int) -> range:
        """The plan's items of all of a rank's parts, which are consecutive."""
        count, parts = self.places(world_size, rank)
        return range(of(count, parts[0]).start, of(count, parts[-1]).stop)

    def _rows_of(self, items: range) -> range:
        """The rows of consecutive items of the plan."""
        if self.group_starts is None:
            return items
        return range(int(self.group_starts[items.start]), int(self.group_starts[items.stop]))


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSpec:
    """A data set that streams: the same for every rank and attempt of a run."""

    name: str
    schema: pa.Schema
    remainder: Remainder

    digests: Mapping[str, str] = field(default_factory=dict)


DatasetSpec: TypeAlias = ShardSpec | StreamSpec
