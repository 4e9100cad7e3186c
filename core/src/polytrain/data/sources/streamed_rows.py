"""Rows of a file that is read from its start, as CSV and JSON Lines files are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

import pyarrow as pa

from polytrain.common.data_errors import ReadError

Part = TypeVar("Part", pa.RecordBatch, pa.Table)


def cut(parts: Iterable[Part], start: int, stop: int, *, rows: int, where: str) -> Iterator[Part]:
    """Yield the rows from `start` to `stop`, and read no further than needed.

    Args:
        parts: the file's rows, in order.
        start: the first row.
        stop: the row after the last.
        rows: number of rows that the file had when the run began.
        where: the file, for errors.

    Raises:
        ReadError: the file has fewer rows, or more after its last.
    """
    first = 0
    for part in parts:
        if first >= stop and part.num_rows:
            first += part.num_rows
            break
        skipped = max(start - first, 0)
        if skipped < part.num_rows:
            yield part.slice(skipped, stop - first - skipped)
        first += part.num_rows
        if first >= stop < rows:
            return
    if first < stop or (stop == rows and first != stop):
        raise ReadError(
            f"{where} has {'fewer' if first < stop else 'more'} than {rows} rows: "
            "the file has changed since the run began. Give a run files that stay as they are"
        )
