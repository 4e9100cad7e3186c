"""How a stream of blocks is dealt to ranks, row by row, and taken up again in the middle. Pure.

The blocks of a stream are known only one after the other. They are dealt in rounds: as many
consecutive blocks as there are ranks, blocks without rows left out, and fewer at the end. Of n rows
in a round, with S rows dealt before it, rank w of W gets count(S + n) - count(S), where
count(x) = (x + W - 1 - w) // W is what it would have of x rows dealt one by one in turn. A rank's
rows of a round are consecutive. So the totals of any two ranks never differ by more than one row,
however uneven the blocks are, and of even blocks each rank gets one whole.

An epoch that is broken off is described by legs: of each, the world size and the rows that every
rank had consumed. The product of the two is the number of rows that are gone, and it lies in one
round; the rounds before that one are consumed, those after it are untouched. What is left of the
round, in rank order, is the first round of the next leg. At an unchanged world size every rank goes
on with exactly the rows that it would have had next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

Block = TypeVar("Block")


class Segment(NamedTuple):
    """A finished stretch of an epoch, at one world size."""

    world_size: int

    rows: int
    """Rows that each rank consumed; one that was dealt fewer consumed all it was dealt."""


@dataclass(frozen=True, slots=True)
class BlockRows(Generic[Block]):
    """Rows start … stop - 1 of a block."""

    block: Block
    """Whatever stands for the block: a number, or a reference to it."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


Part = tuple[BlockRows[Block], ...]
"""One rank's rows of one round, in order. May be empty."""

Round = tuple[Part[Block], ...]
"""The parts of all ranks, by rank."""


class StreamPartitioner(Generic[Block]):
    """Deals the blocks of one epoch to the ranks of the present world.

    Blocks are given one by one, in the order of the stream. Rows that former legs have consumed
    are passed over; their blocks are not in any round.

    Args:
        world_size: ranks of the present world.
        legs: what former worlds consumed of this epoch, in order.
    """

    def __init__(self, world_size: int, legs: Sequence[Segment] = ()) -> None:
        if world_size < 1 or any(leg.world_size < 1 or leg.rows < 0 for leg in legs):
            raise ValueError(f"world_size={world_size}, legs={legs}: give sizes of at least 1")
        # A leg without rows has begun no round and changes nothing.
        self._legs = [leg for leg in legs if leg.rows > 0]
        self._world_size = world_size
        self._gathered: list[BlockRows[Block]] = []
        self._dealt = 0

    @property
    def rows_dealt(self) -> int:
        """Rows of all the rounds of the present leg so far."""
        return self._dealt if not self._legs else 0

    def add(self, rows: BlockRows[Block]) -> Round[Block] | None:
        """Take the stream's next block, and return the round that it completes, if it does."""
        if len(rows):
            self._gathered.append(rows)
        return self._close_round() if len(self._gathered) == self._round_size else None

    def finish(self) -> Round[Block] | None:
        """The stream has ended: the last round, of the blocks that are left, if there are any."""
        return self._close_round() if self._gathered else None

    @property
    def _round_size(self) -> int:
        return self._legs[0].world_size if self._legs else self._world_size

    def _close_round(self) -> Round[Block] | None:
        rows, self._gathered = self._gathered, []
        while self._legs:
            leg = self._legs[0]
            consumed = leg.world_size * leg.rows
            before, self._dealt = self._dealt, self._dealt + _count(rows)
            if self._dealt < consumed:
                return None
            # The leg ends in this round; the next one counts from zero.
            self._legs.pop(0)
            self._dealt, after = 0, self._dealt
            if after == consumed:
                return None
            rows = [
                left
                for rank, part in enumerate(_cut(rows, before, leg.world_size))
                for left in _skip(part, leg.rows - _share(before, leg.world_size, rank))
            ]
        before, self._dealt = self._dealt, self._dealt + _count(rows)
        return _cut(rows, before, self._world_size)


def rank_total(rows_dealt: int, world_size: int, rank: int) -> int:
    """How many of the rows dealt in a leg are one rank's."""
    return _share(rows_dealt, world_size, rank)


def _share(rows: int, world_size: int, rank: int) -> int:
    return (rows + world_size - 1 - rank) // world_size


def _count(rows: Sequence[BlockRows[Block]]) -> int:
    return sum(len(some) for some in rows)


def _cut(rows: Sequence[BlockRows[Block]], before: int, world_size: int) -> Round[Block]:
    """Deal one round, after so many rows in former rounds of the leg."""
    after = before + _count(rows)
    parts: list[Part[Block]] = []
    rest = rows
    for rank in range(world_size):
        size = _share(after, world_size, rank) - _share(before, world_size, rank)
        parts.append(_take(rest, size))
        rest = _skip(rest, size)
    return tuple(parts)


def _take(rows: Sequence[BlockRows[Block]], count: int) -> Part[Block]:
    """The first so many rows."""
    taken: list[BlockRows[Block]] = []
    for some in rows:
        if count <= 0:
            break
        size = min(len(some), count)
        taken.append(BlockRows(some.block, some.start, some.start + size))
        count -= size
    return tuple(taken)


def _skip(rows: Sequence[BlockRows[Block]], count: int) -> Part[Block]:
    """All but the first so many rows."""
    left: list[BlockRows[Block]] = []
    for some in rows:
        start = some.start + min(len(some), count)
        count -= start - some.start
        if start < some.stop:
            left.append(BlockRows(some.block, start, some.stop))
    return tuple(left)
