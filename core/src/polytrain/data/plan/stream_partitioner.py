"""Divides the rows of a stream of blocks among the ranks, also in a resumed epoch. Pure.

Blocks become known one after the other. A round is as many consecutive blocks as there are ranks,
without empty blocks, and fewer at the end. If a round has n rows, and the rounds before it S rows,
rank w of W gets count(S + n) - count(S) consecutive rows of it, where
count(x) = (x + W - 1 - w) // W is its number of x rows that go to the ranks in turn. So the totals
of two ranks never differ by more than one row, however uneven the blocks are, and of even blocks
each rank gets a whole one.

An epoch that was interrupted is described by segments: the world size, and the number of rows that
every rank consumed. Their product is the number of rows that are gone. It lies in one round: those
before it are consumed, those after it aren't. The rest of that round, in rank order, is the first
round of the next segment. At an unchanged world size, every rank resumes with the rows that would
have been its next ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

Block = TypeVar("Block")


class Segment(NamedTuple):
    """A finished part of an epoch, at one world size."""

    world_size: int

    rows: int
    """Number of rows that each rank consumed; a rank that got fewer consumed all of them."""


@dataclass(frozen=True, slots=True)
class BlockRows(Generic[Block]):
    """Rows start … stop - 1 of a block."""

    block: Block
    """A number of the block, or a reference to it."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


RankRows = tuple[BlockRows[Block], ...]
"""One rank's rows of one round, in order. May be empty."""

Round = tuple[RankRows[Block], ...]
"""The rows of all ranks, by rank."""


class StreamPartitioner(Generic[Block]):
    """Divides the blocks of one epoch among the ranks of the present world.

    Rows that former segments consumed are in no round.
    """

    def __init__(self, world_size: int, segments: Sequence[Segment] = ()) -> None:
        """
        Args:
            segments: the consumed parts of this epoch, in order.
        """
        if world_size < 1 or any(one.world_size < 1 or one.rows < 0 for one in segments):
            raise ValueError(f"world_size={world_size}, segments={segments}: at least 1 is needed")
        # A segment without rows has begun no round and changes nothing.
        self._segments = [segment for segment in segments if segment.rows > 0]
        self._world_size = world_size
        self._gathered: list[BlockRows[Block]] = []
        self._rows = 0

    @property
    def rows_in_rounds(self) -> int:
        """Number of rows in all rounds of the present segment so far."""
        return self._rows if not self._segments else 0

    def add(self, rows: BlockRows[Block]) -> Round[Block] | None:
        """Add the stream's next block. Return the round that it completes, if it does."""
        if len(rows):
            self._gathered.append(rows)
        size = self._segments[0].world_size if self._segments else self._world_size
        return self._close_round() if len(self._gathered) == size else None

    def finish(self) -> Round[Block] | None:
        """End the stream. Return the last round, if any blocks are left."""
        return self._close_round() if self._gathered else None

    def _close_round(self) -> Round[Block] | None:
        rows, self._gathered = self._gathered, []
        while self._segments:
            segment = self._segments[0]
            consumed = segment.world_size * segment.rows
            before, self._rows = self._rows, self._rows + sum(map(len, rows))
            if self._rows < consumed:
                return None
            # The segment ends in this round; the next one counts from zero.
            self._segments.pop(0)
            after, self._rows = self._rows, 0
            if after == consumed:
                return None
            rows = [
                left
                for rank, part in enumerate(_divided(rows, before, segment.world_size))
                for left in _split(
                    part, segment.rows - rank_total(before, segment.world_size, rank)
                )[1]
            ]
        before, self._rows = self._rows, self._rows + sum(map(len, rows))
        return _divided(rows, before, self._world_size)


def rank_total(rows: int, world_size: int, rank: int) -> int:
    """Number of one rank's rows, of so many rows of a segment."""
    return (rows + world_size - 1 - rank) // world_size


def _divided(rows: Sequence[BlockRows[Block]], before: int, world_size: int) -> Round[Block]:
    """Divide a round among the ranks. `before` is the number of rows in the segment's rounds."""
    after = before + sum(map(len, rows))
    parts: list[RankRows[Block]] = []
    for rank in range(world_size):
        size = rank_total(after, world_size, rank) - rank_total(before, world_size, rank)
        part, rows = _split(rows, size)
        parts.append(part)
    return tuple(parts)


def _split(rows: Sequence[BlockRows[Block]], count: int) -> tuple[RankRows[Block], RankRows[Block]]:
    """The first `count` rows, and the others."""
    head: list[BlockRows[Block]] = []
    tail: list[BlockRows[Block]] = []
    for some in rows:
        middle = some.start + min(len(some), max(0, count))
        count -= middle - some.start
        if some.start < middle:
            head.append(BlockRows(some.block, some.start, middle))
        if middle < some.stop:
            tail.append(BlockRows(some.block, middle, some.stop))
    return tuple(head), tuple(tail)
