"""Which rows belong to which rank, and in how many batches. Pure, and of constant size.

Rows are numbered through the whole data set, 0 … num_rows - 1, in the order of its pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceRows:
    """Some consecutive rows of one piece of a data set."""

    piece: int
    start: int
    """First row, counted within the piece."""

    stop: int
    """One past the last row."""


def rank_rows(num_rows: int, world_size: int, rank: int) -> range:
    """The rows of one rank: consecutive, each with exactly one rank, sizes at most one apart."""
    return range(num_rows * rank // world_size, num_rows * (rank + 1) // world_size)


def pieces_of(piece_sizes: Sequence[int], rows: range) -> Iterator[PieceRows]:
    """Where the rows are found, in order.

    Args:
        piece_sizes: rows of every piece of the data set, in order.
        rows: consecutive rows of the data set.
    """
    first = 0
    for piece, size in enumerate(piece_sizes):
        start, stop = max(rows.start, first), min(rows.stop, first + size)
        if start < stop:
            yield PieceRows(piece=piece, start=start - first, stop=stop - first)
        first += size


def batch_rows(
    rows: int, most_rows: int, fewest_rows: int, batch_size: int, *, drop_last: bool
) -> Iterator[range]:
    """Cut a rank's rows into batches, the same number of them on every rank.

    Args:
        rows: rows of this rank.
        most_rows: rows of the rank that has the most.
        fewest_rows: rows of the rank that has the fewest.
        batch_size: rows in a batch, at most.
        drop_last: full batches only; otherwise all rows, spread evenly over the batches.
    """
    if drop_last:
        for batch in range(fewest_rows // batch_size):
            yield range(batch * batch_size, (batch + 1) * batch_size)
        return
    batches = -(-most_rows // batch_size)
    for batch in range(batches):
        yield rank_rows(rows, batches, batch)
