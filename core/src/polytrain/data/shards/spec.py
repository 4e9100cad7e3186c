"""A data set of a run, as every worker knows it: its order, and who has its rows at hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
import pyarrow as pa

from polytrain.data.plan.row_plan import Plan, Remainder
from polytrain.data.read.pieces import Piece
from polytrain.data.read.random_transforms import RandomTransform


class Held(StrEnum):
    """Which rows a rank's agent holds in memory that its worker processes map."""

    NOTHING = "nothing"
    """Worker processes read the pieces themselves, a few at a time."""

    SHARE = "its share"
    """What the rank reads as a whole; nothing is iterated over."""

    SHARDS = "its canonical shards"
    """All that the rank's batches may come from."""

    ALL = "all rows"
    """The node's object store has them, once for all agents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardSpec:
    """The same for every rank and attempt of a run."""

    name: str
    num_rows: int
    schema: pa.Schema
    """Of what is read."""

    plan: Plan
    remainder: Remainder
    held: Held

    pieces: tuple[Piece, ...] = ()
    """Where agents hold nothing: what worker processes read."""

    data: Mapping[str, str] = field(default_factory=dict)
    """What the data set is known by: see `fingerprint.marks`."""

    transform: RandomTransform | None = None
    """What is done to batches."""

    whole: bool = False
    """Every rank gets all rows."""

    group_starts: np.ndarray[Any, Any] | None = None
    """With groups: the first row of each, and the number of rows after the last. The plan then
    counts groups."""

    def place(self, world_size: int, rank: int) -> tuple[int, int]:
        """World size and rank, as far as this data set is concerned."""
        return (1, 0) if self.whole else (world_size, rank)

    def share(self, world_size: int, rank: int) -> range:
        """The rows that a rank reads as a whole."""
        return self.rows_of(self.plan.share(*self.place(world_size, rank)))

    def held_rows(self, world_size: int, rank: int) -> range:
        """The rows that the rank's agent holds."""
        match self.held:
            case Held.ALL:
                return range(self.num_rows)
            case Held.SHARDS:
                return self.rows_of(self.plan.reach(*self.place(world_size, rank)))
            case Held.SHARE:
                return self.share(world_size, rank)
        return range(0)

    def excess(self, world_size: int) -> float:
        """How many times its part of the rows the rank that reads most of them reads."""
        is_anywhere = all(piece.seekable(scattered=True) for piece in self.pieces)
        if self.held in (Held.ALL, Held.SHARE) or (self.held is Held.NOTHING and is_anywhere):
            return 1.0
        world_size, _ = self.place(world_size, 0)
        reaches = (self.plan.reach(world_size, rank) for rank in range(world_size))
        return max(map(len, reaches)) * world_size / self.plan.rows

    def rows_of(self, items: range) -> range:
        """The rows of consecutive items of the plan."""
        if self.group_starts is None or not items:
            return items
        return range(int(self.group_starts[items.start]), int(self.group_starts[items.stop]))
