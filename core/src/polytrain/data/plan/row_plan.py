"""Which rows are next, in which order, and whose they are. Pure, and of constant size.

A data set's rows are cut into *canonical shards* when a run begins: consecutive, of equal size.
An epoch is a sequence of positions, dealt to the canonical shards in turn, like cards: position p
is the next row of shard p mod C, in the order of that shard and epoch. A *global batch* is a range
of positions. So what is in a global batch, and what came before it, is the same however many
workers there are, and one number says where a run stands in its epoch.

Workers divide a global batch by its canonical shards. With C workers each has its own shard; with
another number, worker w of W has the part from C * w / W to C * (w + 1) / W of the line of shards,
so shards that lie on a border are read by two workers, of whom each takes its part of every batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Literal, TypeAlias

from polytrain.data.plan.order import InOrder, Order, Shuffled, Windows
from polytrain.storage.typed_json import Count

Shuffle: TypeAlias = bool | Literal["window"]
Remainder: TypeAlias = Literal["keep", "pad", "drop"]
Cut: TypeAlias = Remainder | Literal["share"]
"""How an epoch is cut into global batches. "keep": all are full, except the last, which has the
rows that are left. "pad": the last one reaches beyond the epoch's end. "drop": there are full ones
only. "share": as "keep", but where the last one would be too small, the one before it leaves it
some rows, so that hardly ever a worker has no row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The order of all epochs of a data set.

    Nothing here is as large as the data: not in memory, and not in time.
    """

    rows: Count
    """Rows of the data set; with groups, groups."""

    shards: Count
    """Canonical shards."""

    shuffle: Shuffle = False
    """False: each shard in its order. True: each shard in any order. "window": each shard's windows
    in any order, and the rows of each window in any order, so that few rows need to be at hand."""

    window: Count = 1 << 16
    """Rows in a window. Windows begin at its multiples, as row groups of that size do."""

    seed: int = 0

    def shard_rows(self, shard: int) -> range:
        """The rows of a canonical shard."""
        starts = _starts(self.rows, self.shards)
        return range(starts[shard], starts[shard + 1])

    def share(self, world_size: int, rank: int) -> range:
        """The rows of one worker, as a part of the data set: consecutive, each with one worker."""
        parts = [
            _part(self.shard_rows(shard), low, high, world_size)
            for shard, low, high in _shards_of(self.shards, world_size, rank)
        ]
        return range(parts[0].start, parts[-1].stop)

    def reach(self, world_size: int, rank: int) -> range:
        """The rows that a worker's batches come from: those of all shards that it has a part of."""
        parts = [self.shard_rows(shard) for shard, *_ in _shards_of(self.shards, world_size, rank)]
        return range(parts[0].start, parts[-1].stop)

    def batch_stop(self, start: int, batch_rows: int, cut: Cut, *, least: int = 1) -> int:
        """One past the last position of the global batch that begins at a position.

        The same as `start` when no batch is left.

        Args:
            start: position of the batch's first row.
            batch_rows: rows in a global batch, at most.
            cut: how the epoch is cut.
            least: with "share", rows that the last batch should have, and gets from the one before
                if it has fewer. Of one for each worker, both parts of that are even.
        """
        left = max(0, self.rows - start)
        if cut == "share" and 0 < left - batch_rows < least <= (batch_rows + 1) // 2:
            return start + batch_rows - least
        if cut in ("keep", "share"):
            return start + min(left, batch_rows)
        full = left >= batch_rows or (cut == "pad" and left > 0)
        return start + batch_rows if full else start

    def global_batches(
        self, start: int, batch_rows: int, cut: Cut, *, least: int = 1
    ) -> Iterator[range]:
        """The global batches from a position to the epoch's end, as ranges of positions."""
        while (stop := self.batch_stop(start, batch_rows, cut, least=least)) > start:
            yield range(start, stop)
            start = stop

    def num_batches(self, start: int, batch_rows: int, cut: Cut) -> int:
        """How many global batches there are from a position to the epoch's end."""
        left = max(0, self.rows - start)
        return left // batch_rows if cut == "drop" else -(-left // batch_rows)

    def batch_share(
        self, start: int, stop: int, world_size: int, rank: int
    ) -> Iterator[tuple[int, range]]:
        """One worker's part of the global batch of positions start … stop - 1.

        Yields:
            A canonical shard, and which of its rows, counted in the order of the epoch. Beyond a
            shard's end its rows begin anew.
        """
        for shard, low, high in _shards_of(self.shards, world_size, rank):
            turn = self._turns[shard]
            dealt = range(-((turn - start) // self.shards), -((turn - stop) // self.shards))
            yield from self._wrapped(shard, _part(dealt, low, high, world_size))

    def epoch(self, number: int) -> EpochOrder:
        """The order of one epoch."""
        return EpochOrder(self, number)

    def _wrapped(self, shard: int, indices: range) -> Iterator[tuple[int, range]]:
        size = len(self.shard_rows(shard))
        if size == 0 and self.rows:
            # A shard without rows is filled up with the first shard's: that one has some.
            shard = self.shard_at(0)
            size = len(self.shard_rows(shard))
        while indices:
            first = indices.start % size
            count = min(len(indices), size - first)
            yield shard, range(first, first + count)
            indices = indices[count:]

    @property
    def _turns(self) -> Sequence[int]:
        return _turns(self.shards)

    def shard_at(self, turn: int) -> int:
        """The shard to which a position is dealt whose rest by the number of shards is `turn`."""
        return self._turns.index(turn)


class EpochOrder:
    """The order of one epoch's rows."""

    def __init__(self, plan: Plan, number: int) -> None:
        self._plan = plan
        self._number = number
        self._orders: dict[int, Order] = {}

    def __getitem__(self, position: int) -> int:
        """The row at a position."""
        index, turn = divmod(position, self._plan.shards)
        return self.of_shard(self._plan.shard_at(turn))[index]

    def of_shard(self, shard: int) -> Order:
        """The order of one canonical shard's rows."""
        if shard not in self._orders:
            self._orders[shard] = self._order(shard)
        return self._orders[shard]

    def _order(self, shard: int) -> Order:
        plan = self._plan
        rows, key = plan.shard_rows(shard), (plan.seed, self._number, shard)
        if plan.shuffle == "window":
            return Windows(rows, plan.window, key)
        return Shuffled(rows, key) if plan.shuffle else InOrder(rows)


def _part(whole: range, low: int, high: int, parts: int) -> range:
    """From low / parts to high / parts of some consecutive numbers."""
    return whole[len(whole) * low // parts : len(whole) * high // parts]


@lru_cache(maxsize=8)
def _turns(shards: int) -> tuple[int, ...]:
    """Shard → its turn when positions are dealt.

    Turns go back and forth over the line of shards (by the reversed bits of their numbers), so that
    any few positions in a row are spread over all workers, however many there are.
    """
    bits = max(1, (shards - 1).bit_length())
    order = sorted(range(shards), key=lambda shard: int(f"{shard:0{bits}b}"[::-1], 2))
    turns = [0] * shards
    for turn, shard in enumerate(order):
        turns[shard] = turn
    return tuple(turns)


@lru_cache(maxsize=64)
def _starts(rows: int, shards: int) -> tuple[int, ...]:
    """Where each shard begins; and the end. Those that are dealt to first may have a row more."""
    least, rest = divmod(rows, shards)
    sizes = (least + (turn < rest) for turn in _turns(shards))
    return tuple(accumulate(sizes, initial=0))


@lru_cache(maxsize=64)
def _shards_of(shards: int, world_size: int, rank: int) -> tuple[tuple[int, int, int], ...]:
    """A worker's part of the line of shards: shard, and from where to where, of world_size."""
    first, last = shards * rank, shards * (rank + 1)
    return tuple(
        (
            shard,
            max(first - shard * world_size, 0),
            min(last - shard * world_size, world_size),
        )
        for shard in range(first // world_size, -(-last // world_size))
    )
