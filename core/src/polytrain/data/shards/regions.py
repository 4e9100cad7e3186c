"""Rows that lie together, of which batches are parts: converted once for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from polytrain.data.shards.formats import Combine, column_to_numpy, combiner, to_format
from polytrain.data.sources.missing import may_be_missing

_AT_ONCE = 1 << 13
"""Rows whose values are converted at once where that takes memory."""


class Region:
    """A table, and its columns as arrays: without a copy as a whole, otherwise rows as wanted."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table
        self._converted: dict[int, tuple[range, np.ndarray[Any, Any]]] = {}

    @cached_property
    def columns(self) -> tuple[tuple[str, Combine], ...]:
        """The name of each column, and what makes a batch's array of its parts."""
        return tuple((field.name, combiner(field.type)) for field in self.table.schema)

    def array(self, index: int, start: int, stop: int) -> np.ndarray[Any, Any]:
        """Rows start … stop - 1 of a column."""
        rows, array = self._converted.get(index, (range(0), None))
        if array is None or start < rows.start or stop > rows.stop:
            field, column = self.table.schema.field(index), self.table.column(index)
            rows = range(self.table.num_rows)
            if not _converts_for_free(column, field):
                rows = range(start, max(stop, min(start + _AT_ONCE, rows.stop)))
            array = column_to_numpy(column.slice(rows.start, len(rows)), field)
            self._converted[index] = rows, array
        return array[start - rows.start : stop - rows.start]


def _converts_for_free(column: pa.ChunkedArray, field: pa.Field) -> bool:
    """Whether a column's memory is that of the array. All others may be many times as large."""
    kind = column.type.value_type if _is_tensor(column.type) else column.type
    is_number = pa.types.is_primitive(kind) and not pa.types.is_boolean(kind)
    return (
        is_number and column.num_chunks == 1 and not column.null_count and not may_be_missing(field)
    )


def _is_tensor(kind: pa.DataType) -> bool:
    return isinstance(kind, pa.FixedShapeTensorType)


@dataclass(frozen=True, slots=True)
class RowSlice:
    """Rows start … stop - 1 of a region."""

    region: Region
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    @classmethod
    def of(cls, table: pa.Table) -> RowSlice:
        """All rows of a table."""
        return cls(Region(table), 0, table.num_rows)


def excerpts_to_format(excerpts: Sequence[RowSlice], batch_format: str) -> Any:
    """Rows of one or more regions, one after another, in the format that is asked for.

    Arrays may be written to.
    """
    if batch_format != "numpy":
        tables = [part.region.table.slice(part.start, len(part)) for part in excerpts]
        if len(tables) == 1:
            return to_format(tables[0], batch_format)
        # Of two regions one may have been so large that it got wider types.
        return to_format(pa.concat_tables(tables, promote_options="permissive"), batch_format)
    return {
        name: combine([part.region.array(index, part.start, part.stop) for part in excerpts])
        for index, (name, combine) in enumerate(excerpts[0].region.columns)
    }
