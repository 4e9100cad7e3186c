"""Rows that lie together, of which batches are parts: converted once for all of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from polytrain.data.types.columns import Combine, column_to_numpy, combiner, to_format
from polytrain.data.types.missing import may_be_missing

_AT_ONCE = 1 << 13
"""Rows whose values are converted at once where that takes memory."""

_AS_IN_NUMPY = (
    pa.types.is_integer,
    pa.types.is_floating,
    pa.types.is_timestamp,
    pa.types.is_duration,
)
"""Dates are wider there, and times of the day are objects."""

_MOST_LENT_BYTES = 1 << 25
"""Of a column whose memory batches are parts of: a batch that is kept keeps all of it."""


class Region:
    """A table, and its columns as arrays: without a copy as a whole, otherwise rows as wanted."""

    def __init__(self, table: pa.Table, *, lends: bool = False) -> None:
        """
        Args:
            table: the rows.
            lends: nothing else uses the table's memory, and each row is taken once, so that
                batches may be parts of it.
        """
        self.table = table
        self._lends = lends
        self._converted: dict[int, tuple[range, np.ndarray[Any, Any]]] = {}

    @cached_property
    def columns(self) -> tuple[tuple[str, Combine, np.ndarray[Any, Any] | None], ...]:
        """Of each column its name, what makes a batch's array of its parts, and, if batches may be
        parts of its memory, all of its rows."""
        return tuple(
            (field.name, combiner(field.type), self._lent(index) if self._lends else None)
            for index, field in enumerate(self.table.schema)
        )

    @cached_property
    def whole(self) -> tuple[np.ndarray[Any, Any] | None, ...]:
        """Of each column all of its rows, if that takes no memory."""
        return tuple(
            column_to_numpy(column, field) if _converts_for_free(column, field) else None
            for field, column in zip(self.table.schema, self.table.columns, strict=True)
        )

    def array(self, index: int, start: int, stop: int) -> np.ndarray[Any, Any]:
        """Rows start … stop - 1 of a column, which have to be copied."""
        whole = self.whole[index]
        if whole is not None:
            return whole[start:stop]
        rows, array = self._converted.get(index, (range(0), None))
        if array is None or start < rows.start or stop > rows.stop:
            field, column = self.table.schema.field(index), self.table.column(index)
            rows = range(start, max(stop, min(start + _AT_ONCE, self.table.num_rows)))
            array = column_to_numpy(column.slice(rows.start, len(rows)), field)
            self._converted[index] = rows, array
        return array[start - rows.start : stop - rows.start]

    def batch(self, start: int, stop: int) -> dict[str, np.ndarray[Any, Any]]:
        """Rows start … stop - 1 in memory of their own."""
        return {
            name: combine([self.array(index, start, stop)]) if lent is None else lent[start:stop]
            for index, (name, combine, lent) in enumerate(self.columns)
        }

    def gathered(self, index: int, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """These rows of a column, from anywhere, in memory of their own."""
        whole = self.whole[index]
        if whole is not None:
            return whole.take(rows, axis=0)
        _, combine, _ = self.columns[index]
        column = self.table.column(index).take(pa.array(rows))
        return combine([column_to_numpy(column, self.table.schema.field(index))])

    def _lent(self, index: int) -> np.ndarray[Any, Any] | None:
        whole = self.whole[index]
        if whole is None:
            return None
        return _writable(whole, self.table.column(index).chunk(0).buffers()[-1])


def _writable(array: np.ndarray[Any, Any], memory: pa.Buffer) -> np.ndarray[Any, Any] | None:
    """An array of Arrow's memory that can be written to; None if it can't be, or keeps too much."""
    if memory is None or not memory.is_mutable or memory.size > _MOST_LENT_BYTES:
        return None
    offset = array.ctypes.data - memory.address
    if not 0 <= offset <= memory.size - array.nbytes:
        return None
    return np.ndarray(array.shape, array.dtype, memory, offset, array.strides)


def _converts_for_free(column: pa.ChunkedArray, field: pa.Field) -> bool:
    """Whether a column's memory is that of the array. All others may be many times as large."""
    kind = column.type
    if isinstance(kind, pa.FixedShapeTensorType):
        kind = kind.value_type
    return (
        any(is_such(kind) for is_such in _AS_IN_NUMPY)
        and column.num_chunks == 1
        and not column.null_count
        and not may_be_missing(field)
    )


class Excerpt(ABC):
    """Some rows of a region."""

    region: Region

    @abstractmethod
    def __len__(self) -> int:
        """How many there are."""

    @property
    @abstractmethod
    def table(self) -> pa.Table:
        """The rows."""

    @abstractmethod
    def array(self, index: int) -> np.ndarray[Any, Any]:
        """A column, which may be memory that others use."""

    @abstractmethod
    def batch(self) -> dict[str, np.ndarray[Any, Any]]:
        """All columns, in memory of their own."""


@dataclass(frozen=True, slots=True)
class RowSlice(Excerpt):
    """Rows start … stop - 1 of a region."""

    region: Region
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    @classmethod
    def of(cls, table: pa.Table, *, lends: bool = False) -> RowSlice:
        """All rows of a table; see `Region`."""
        return cls(Region(table, lends=lends), 0, table.num_rows)

    @property
    def table(self) -> pa.Table:
        return self.region.table.slice(self.start, len(self))

    def array(self, index: int) -> np.ndarray[Any, Any]:
        return self.region.array(index, self.start, self.stop)

    def batch(self) -> dict[str, np.ndarray[Any, Any]]:
        return self.region.batch(self.start, self.stop)


@dataclass(frozen=True, slots=True)
class ScatteredRows(Excerpt):
    """Rows from anywhere in a region, by their numbers in it."""

    region: Region
    rows: np.ndarray[Any, Any]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def table(self) -> pa.Table:
        return self.region.table.take(pa.array(self.rows))

    def array(self, index: int) -> np.ndarray[Any, Any]:
        return self.region.gathered(index, self.rows)

    def batch(self) -> dict[str, np.ndarray[Any, Any]]:
        names = self.region.table.column_names
        return {name: self.array(index) for index, name in enumerate(names)}


def excerpts_to_format(excerpts: Sequence[Excerpt], batch_format: str) -> Any:
    """Rows of one or more regions, one after another, in the format that is asked for.

    Arrays may be written to, and share no memory with those of other batches.
    """
    if batch_format != "numpy":
        tables = [part.table for part in excerpts]
        if len(tables) == 1:
            return to_format(tables[0], batch_format)
        # Of two regions one may have been so large that it got wider types.
        return to_format(pa.concat_tables(tables, promote_options="permissive"), batch_format)
    if len(excerpts) == 1:
        return excerpts[0].batch()
    return {
        name: combine([part.array(index) for part in excerpts])
        for index, (name, combine, _) in enumerate(excerpts[0].region.columns)
    }
