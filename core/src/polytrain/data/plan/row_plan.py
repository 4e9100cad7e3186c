"""Decides which rows come next, in which order, and on which rank. Pure, and of constant size.

A data set's rows are cut into *canonical shards* when a run begins: consecutive, of equal size.
An epoch is a sequence of positions. Position p is the next row of the shard whose turn is p mod C,
in the order of that shard and epoch. A *global batch* is a range of positions. So a global batch
has the same rows, after the same other rows, however many workers there are, and one number says
how far a run is in its epoch.

Workers divide a global batch by its canonical shards. With C workers each has its own shard. With
W workers, worker w has the part from C * w / W to C * (w + 1) / W of the line of shards. A shard on
a border is read by two workers; each takes its part of every batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Literal, TypeAlias

import numpy as np

from polytrain.data.plan.mixture import Mixture, SourceOrder
from polytrain.data.plan.order import RowNumbers, ShardOrder
from polytrain.storage.typed_json import Count

Shuffle: TypeAlias = bool | Literal["window"]
Remainder: TypeAlias = Literal["keep", "pad", "drop"]
Cut: TypeAlias = Remainder | Literal["share"]
"""The way in which an epoch is cut into global batches.

"keep": all are full except the last, which has the rows that are left. "pad": the last batch is
filled with the epoch's first rows. "drop": there are full batches only. "share": like "keep", but
if the last batch would be too small, the one before it leaves it some rows, so that a worker
hardly ever has none.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The order of all epochs of a data set.

    No method takes memory or time in proportion to the data.
    """

    rows: Count
    """Number of rows of the data set; with groups, of groups."""

    shards: Count
    """Number of canonical shards. Each has a row, unless there are no rows."""

    shuffle: Shuffle = False
    """False keeps the order. True shuffles each shard's rows. "window" shuffles each shard's
    windows, and the rows of each window, so that few rows need to be in memory."""

    window: Count = 1 << 16
    """Rows in a window. Windows begin at its multiples, as row groups of that size do."""

    seed: int = 0

    mix: Mixture | None = None
    """The sources of a mix, whose order takes the place of the only canonical shard's."""

    def shard_rows(self, shard: int) -> range:
        """The rows of a canonical shard."""
        starts = _starts(self.rows, self.shards)
        return range(starts[shard], starts[shard + 1])

    def share(self, world_size: int, rank: int) -> range:
        """A worker's part of the data set: consecutive rows, which no other worker has."""
        parts = [
            _part(self.shard_rows(shard), low, high, world_size)
            for shard, low, high in _shards_of(self.shards, world_size, rank)
        ]
        return range(parts[0].start, parts[-1].stop)

    def reach(self, world_size: int, rank: int) -> range:
        """The rows of all shards from which a worker's batches come."""
        if self.mix is not None:
            return range(self.mix.all_rows)
        parts = [self.shard_rows(shard) for shard, *_ in _shards_of(self.shards, world_size, rank)]
        return range(parts[0].start, parts[-1].stop)

    def batch_stop(self, start: int, batch_rows: int, cut: Cut, *, least: int = 1) -> int:
        """The end of the global batch that begins at a position; `start` if no batch is left.

        Args:
            start: position of the batch's first row.
            batch_rows: maximum number of rows in a global batch.
            cut: how the epoch is cut.
            least: with "share", number of rows that the last batch should have. If it has fewer, it
                gets so many from the one before. If that is the number of workers, both batches are
                even.
        """
        left = max(0, self.rows - start)
        if cut == "share" and 0 < left - batch_rows < least <= (batch_rows + 1) // 2:
            return start + batch_rows - least
        if cut in ("keep", "share"):
            return start + min(left, batch_rows)
        full = left >= batch_rows or (cut == "pad" and left > 0)
        return start + batch_rows if full else start

    def global_batches(
        self,
        start: int,
        batch_rows: int,
        cut: Cut,
        *,
        least: int = 1,
        skipped: Sequence[range] = (),
    ) -> Iterator[range]:
        """The global batches from a position to the epoch's end, as ranges of positions.

        Batches that were cut in the same way are left out, or come, as a whole. Otherwise, as with
        another number of rows in a batch, the batch before skipped positions is cut short; where
        all batches have to be full, or it would have fewer rows than `least`, it is left out, too.

        Args:
            start: the first position.
            batch_rows: maximum number of rows in a global batch.
            cut: how the epoch is cut.
            least: see `batch_stop`.
            skipped: positions that are left out, in order, apart from each other.
        """
        for hole in skipped:
            while start < hole.start:
                stop = self.batch_stop(start, batch_rows, cut, least=least)
                if stop == start:
                    return
                is_short = stop > hole.start
                stop = min(stop, hole.start)
                is_left_out = is_short and (cut in ("pad", "drop") or stop - start < least)
                if not is_left_out:
                    yield range(start, stop)
                start = stop
            start = max(start, hole.stop)
        while (stop := self.batch_stop(start, batch_rows, cut, least=least)) > start:
            yield range(start, stop)
            start = stop

    def num_batches(
        self,
        start: int,
        batch_rows: int,
        cut: Cut,
        *,
        least: int = 1,
        skipped: Sequence[range] = (),
    ) -> int:
        """The number of global batches from a position to the epoch's end; see `global_batches`."""
        if skipped:
            found = self.global_batches(start, batch_rows, cut, least=least, skipped=skipped)
            return sum(1 for _ in found)
        left = max(0, self.rows - start)
        return left // batch_rows if cut == "drop" else -(-left // batch_rows)

    def batch_share(
        self, start: int, stop: int, world_size: int, rank: int
    ) -> Iterator[tuple[int, range]]:
        """One worker's part of the global batch of positions start … stop - 1.

        Yields:
            A canonical shard, and indices in its order of the epoch. Indices beyond the shard's end
            become indices from its start. Of a mix, a source in place of the shard.
        """
        if self.mix is not None:
            for positions in self._mixed_positions(start, stop, world_size, rank):
                yield from self.mix.share(positions)
            return
        for shard, low, high in _shards_of(self.shards, world_size, rank):
            turn = _turns(self.shards)[shard]
            indices = range(-((turn - start) // self.shards), -((turn - stop) // self.shards))
            yield from self._wrapped(shard, _part(indices, low, high, world_size))

    def batch_order(self, start: int, stop: int, world_size: int, rank: int) -> RowNumbers | None:
        """The order of the rows of `batch_share`, of a mix; None if they are in order."""
        if self.mix is None:
            return None
        orders: list[RowNumbers] = []
        for positions in self._mixed_positions(start, stop, world_size, rank):
            orders.append(self.mix.order(positions) + sum(map(len, orders)))
        return np.concatenate(orders) if orders else None

    def _mixed_positions(
        self, start: int, stop: int, world_size: int, rank: int
    ) -> Iterator[range]:
        """One worker's part of a global batch; positions beyond the end are those of the start."""
        positions = _part(range(start, stop), rank, rank + 1, world_size)
        while positions:
            first = positions.start % self.rows
            count = min(len(positions), self.rows - first)
            yield range(first, first + count)
            positions = positions[count:]

    def epoch(self, number: int) -> EpochOrder:
        """The order of one epoch."""
        return EpochOrder(self, number)

    def _wrapped(self, shard: int, indices: range) -> Iterator[tuple[int, range]]:
        size = len(self.shard_rows(shard))
        while indices:
            first = indices.start % size
            count = min(len(indices), size - first)
            yield shard, range(first, first + count)
            indices = indices[count:]


class EpochOrder:
    """The order of one epoch's rows."""

    def __init__(self, plan: Plan, number: int) -> None:
        self._plan = plan
        self._number = number
        self._orders: dict[int, ShardOrder | SourceOrder] = {}

    def __getitem__(self, position: int) -> int:
        """The row at a position."""
        [(shard, indices)] = self._plan.batch_share(position, position + 1, 1, 0)
        [selection] = self.of_shard(shard).select(indices)
        return int(selection.rows[0])

    def of_shard(self, shard: int) -> ShardOrder | SourceOrder:
        """The order of one canonical shard's rows; of a mix, of one source's."""
        if shard not in self._orders:
            plan = self._plan
            self._orders[shard] = (
                self._order(plan.shard_rows(shard), self._number, shard)
                if plan.mix is None
                else plan.mix.order_of(
                    shard,
                    self._number,
                    plan.rows,
                    lambda rows, number: self._order(rows, number, shard),
                )
            )
        return self._orders[shard]

    def _order(self, rows: range, number: int, shard: int) -> ShardOrder:
        """The order of rows in one pass over them."""
        plan = self._plan
        key = (plan.seed, number, shard) if plan.shuffle else None
        return ShardOrder(rows, key, plan.window if plan.shuffle == "window" else None)


def _part(whole: range, low: int, high: int, parts: int) -> range:
    """The numbers from low / parts to high / parts of `whole`."""
    return whole[len(whole) * low // parts : len(whole) * high // parts]


@lru_cache(maxsize=8)
def _turns(shards: int) -> tuple[int, ...]:
    """The turn of each shard: it has the positions p with p mod C == turn.

    Turns are ordered by the reversed bits of the shards' numbers, so that a few consecutive
    positions are spread over all workers, whatever their number.
    """
    bits = max(1, (shards - 1).bit_length())
    order = sorted(range(shards), key=lambda shard: int(f"{shard:0{bits}b}"[::-1], 2))
    turns = [0] * shards
    for turn, shard in enumerate(order):
        turns[shard] = turn
    return tuple(turns)


@lru_cache(maxsize=64)
def _starts(rows: int, shards: int) -> tuple[int, ...]:
    """The first row of each shard, and the end. Shards with early turns may have one row more."""
    least, rest = divmod(rows, shards)
    sizes = (least + (turn < rest) for turn in _turns(shards))
    return tuple(accumulate(sizes, initial=0))


@lru_cache(maxsize=64)
def _shards_of(shards: int, world_size: int, rank: int) -> tuple[tuple[int, int, int], ...]:
    """A worker's part of the line of shards: shard, start and stop, in units of 1 / world_size."""
    first, last = shards * rank, shards * (rank + 1)
    return tuple(
        (
            shard,
            max(first - shard * world_size, 0),
            min(last - shard * world_size, world_size),
        )
        for shard in range(first // world_size, -(-last // world_size))
    )
