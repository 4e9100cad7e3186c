"""Divides the rows of a prediction into parts, and these into units of work. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import pyarrow as pa

from polytrain.data.read.pieces import Piece

PART_ROWS = 100_000
"""Rows of a part, unless that would make too many parts."""

_MOST_PARTS = 1000
_MOST_PART_ROWS = 1_000_000

_DIGITS = 5
"""Minimum digits of a part's number in the name of its file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Consecutive rows that are predicted together, and stored in one file."""

    number: int
    rows: range
    """Indices of its rows in the data set."""

    file: str


Unit = tuple[Part, ...]
"""Parts that one worker predicts in one pass over their rows."""


def default_part_rows(rows: int) -> int:
    """Return the rows of a part. The number depends only on the data set, so that another call with
    a different number of workers makes the same parts."""
    return max(PART_ROWS, min(_MOST_PART_ROWS, -(-rows // _MOST_PARTS)))


def divided(rows: int, part_rows: int) -> tuple[Part, ...]:
    """Divide rows into parts of this many; the last may have fewer.

    The names of the files sort in the order of the rows.
    """
    starts = range(0, rows, part_rows)
    digits = max(_DIGITS, len(str(len(starts) - 1)))
    return tuple(
        Part(
            number=number,
            rows=range(start, min(start + part_rows, rows)),
            file=f"part-{number:0{digits}}.parquet",
        )
        for number, start in enumerate(starts)
    )


def units(
    parts: Sequence[Part], pieces: Sequence[Piece], *, finished: Collection[int] = ()
) -> tuple[Unit, ...]:
    """Group the unfinished parts into units of work.

    A unit is one part. But a piece that can only be read from its start, such as a CSV file, is one
    unit: one worker reads it in one pass.

    Args:
        pieces: the pieces of the data set.
        finished: numbers of the parts that needn't be predicted.
    """
    ends = list(accumulate(piece.rows for piece in pieces))

    def unit(part: Part) -> tuple[bool, int]:
        piece = bisect_right(ends, part.rows.start)
        # The rows of a computed stream are in none of the user's pieces.
        is_seekable = piece == len(pieces) or pieces[piece].seekable(scattered=False)
        return (True, part.number) if is_seekable else (False, piece)

    remaining = (part for part in parts if part.number not in finished)
    return tuple(tuple(group) for _, group in groupby(remaining, key=unit))


def cut(tables: Iterable[pa.Table], unit: Unit) -> Iterator[tuple[Part, pa.Table]]:
    """Cut the rows of a pass at the ends of parts, and leave out those between parts.

    Args:
        tables: the rows from the start of the first part to the end of the last part, in order.
        unit: the parts.
    """
    start = unit[0].rows.start
    waiting = iter(unit)
    part = next(waiting)
    for table in tables:
        stop = start + table.num_rows
        while True:
            first, last = max(start, part.rows.start), min(stop, part.rows.stop)
            if first < last:
                yield part, table.slice(first - start, last - first)
            if part.rows.stop > stop:
                break
            following = next(waiting, None)
            if following is None:
                return
            part = following
        start = stop
