"""Tables of which many batches are made: columns are converted to arrays once for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from polytrain.data.types.columns import Combine, column_to_numpy, combiner, to_format
from polytrain.data.types.nested import gives_containers
from polytrain.data.types.plain import may_be_missing

Array: TypeAlias = np.ndarray[Any, Any]

_CONVERTED_ROWS = 1 << 13
"""Number of rows that are converted together if their arrays need memory of their own."""

_SAME_IN_NUMPY = (
    pa.types.is_integer,
    pa.types.is_floating,
    pa.types.is_timestamp,
    pa.types.is_duration,
)
"""Types whose values NumPy has in the same form. Its dates are wider, its times are objects."""

_MOST_LENT_BYTES = 1 << 25
"""Maximum size of a column for batches to be views of it: a kept batch keeps all of its memory."""


class DecodedTable:
    """A table and its columns as arrays."""

    def __init__(self, table: pa.Table, *, lends: bool = False) -> None:
        """
        Args:
            lends: whether batches may be views of the table's memory. Nothing else may use that
                memory, and each row may be taken once only.
        """
        self.table = table
        self._lends = lends
        self._converted: dict[int, tuple[range, Array]] = {}

    @cached_property
    def columns(self) -> tuple[tuple[str, Combine, Array | None], ...]:
        """Per column: name, combine function, and the whole array if batches may be views of it."""
        return tuple(
            (field.name, combiner(field.type), self._lent(index) if self._lends else None)
            for index, field in enumerate(self.table.schema)
        )

    def array(self, index: int, rows: range | Array) -> Array:
        """Return rows of a column. Its memory may be shared if `rows` is a range."""
        whole = self._whole[index]
        if not isinstance(rows, range):
            return self._gathered(index, rows) if whole is None else whole.take(rows, axis=0)
        if whole is not None:
            return whole[rows.start : rows.stop]
        known, array = self._converted.get(index, (range(0), None))
        if array is None or rows.start < known.start or rows.stop > known.stop:
            field = self.table.schema.field(index)
            column = self.table.column(index)
            if gives_containers(field.type):
                # Whoever gets them may change them: nobody else gets the same ones.
                return column_to_numpy(column.slice(rows.start, len(rows)), field)
            stop = min(rows.start + _CONVERTED_ROWS, self.table.num_rows)
            known = range(rows.start, max(rows.stop, stop))
            array = column_to_numpy(column.slice(known.start, len(known)), field)
            self._converted[index] = known, array
        return array[rows.start - known.start : rows.stop - known.start]

    def batch(self, rows: range | Array) -> dict[str, Array]:
        """Return rows of all columns, in memory of their own."""
        if not isinstance(rows, range):
            return {name: self.array(n, rows) for n, (name, *_) in enumerate(self.columns)}
        return {
            name: combine([self.array(index, rows)])
            if lent is None
            else lent[rows.start : rows.stop]
            for index, (name, combine, lent) in enumerate(self.columns)
        }

    @cached_property
    def _whole(self) -> tuple[Array | None, ...]:
        """Per column: the whole array if it needs no memory of its own."""
        return tuple(
            column_to_numpy(column, field) if _converts_for_free(column, field) else None
            for field, column in zip(self.table.schema, self.table.columns, strict=True)
        )

    def _gathered(self, index: int, rows: Array) -> Array:
        _, combine, _ = self.columns[index]
        column = self.table.column(index).take(pa.array(rows))
        return combine([column_to_numpy(column, self.table.schema.field(index))])

    def _lent(self, index: int) -> Array | None:
        whole = self._whole[index]
        if whole is None:
            return None
        return _writable(whole, self.table.column(index).chunk(0).buffers()[-1])


@dataclass(frozen=True, slots=True)
class TableRows:
    """Rows of a decoded table: consecutive ones, or those with these numbers."""

    source: DecodedTable
    rows: range | Array

    @classmethod
    def of(cls, table: pa.Table, *, lends: bool = False) -> TableRows:
        """All rows of a table; see `DecodedTable` for `lends`."""
        return cls(DecodedTable(table, lends=lends), range(table.num_rows))

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def table(self) -> pa.Table:
        """The rows as a table."""
        if isinstance(self.rows, range):
            return self.source.table.slice(self.rows.start, len(self.rows))
        return self.source.table.take(pa.array(self.rows))


def to_batch(parts: Sequence[TableRows], batch_format: str) -> Any:
    """Join rows, of one or more tables with the same columns, to a batch of a format.

    The arrays of "numpy" may be written to and share no memory with those of other batches.
    """
    if batch_format != "numpy":
        tables = [part.table for part in parts]
        if len(tables) == 1:
            return to_format(tables[0], batch_format)
        # One of the tables may have been so large that it got wider types.
        return to_format(pa.concat_tables(tables, promote_options="permissive"), batch_format)
    if len(parts) == 1:
        return parts[0].source.batch(parts[0].rows)
    return {
        name: combine([part.source.array(index, part.rows) for part in parts])
        for index, (name, combine, _) in enumerate(parts[0].source.columns)
    }


def _writable(array: Array, memory: pa.Buffer) -> Array | None:
    """A writable view of an array in Arrow's memory; None if there is none, or it is too large."""
    if memory is None or not memory.is_mutable or memory.size > _MOST_LENT_BYTES:
        return None
    offset = array.ctypes.data - memory.address
    if not 0 <= offset <= memory.size - array.nbytes:
        return None
    return np.ndarray(array.shape, array.dtype, memory, offset, array.strides)


def _converts_for_free(column: pa.ChunkedArray, field: pa.Field) -> bool:
    """Whether a column's array has the same memory. All others may be many times as large."""
    kind = column.type
    if isinstance(kind, pa.FixedShapeTensorType):
        kind = kind.value_type
    return (
        any(is_such(kind) for is_such in _SAME_IN_NUMPY)
        and column.num_chunks == 1
        and not column.null_count
        and not may_be_missing(field)
    )
