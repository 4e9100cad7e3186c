"""A table of plain columns in one piece of memory, into which its parts are copied as they come.

A process that reads files into it needs memory for one more part only. A process that maps it gets
every column in one chunk. The memory has `_HEAD`, the schema, and the number of missing values of
each column. Then follow, for each column, Arrow's validity bits and its values. If no value is
missing, the bits are never written and take no memory.
"""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
import pyarrow as pa

from polytrain.data.types.lists import check_numbers

_HEAD = struct.Struct("<8sqq")
"""`_MAGIC`, rows, bytes of the schema."""

_MAGIC = b"PTTABLE1"
_ALIGNMENT = 64

Octets = np.ndarray[Any, np.dtype[np.uint8]]


def is_plain(schema: pa.Schema) -> bool:
    """Whether all columns are numbers, booleans, times, or tensors of them."""
    return all(pa.types.is_primitive(_value_type(column.type)) for column in schema)


def is_laid_out(memory: memoryview) -> bool:
    """Whether memory begins with such a table."""
    return bytes(memory[: len(_MAGIC)]) == _MAGIC


def laid_out(memory: memoryview) -> pa.Table:
    """Return the table in memory, without a copy."""
    _, rows, size = _HEAD.unpack_from(memory)
    buffer = pa.py_buffer(memory)
    schema = pa.ipc.read_schema(buffer.slice(_HEAD.size, size))
    layout = TableLayout(schema, rows)
    columns = []
    for (there, values), column, missing in zip(
        layout.columns, schema, layout.missing(memory).tolist(), strict=True
    ):
        valid = buffer.slice(there.start, len(there)) if missing else None
        held = buffer.slice(values.start, len(values))
        columns.append(_array(column.type, rows, valid, held, missing))
    return pa.Table.from_arrays(columns, schema=schema)


def _array(
    kind: pa.DataType, rows: int, valid: pa.Buffer | None, held: pa.Buffer, missing: int
) -> pa.Array:
    if not isinstance(kind, pa.FixedShapeTensorType):
        return pa.Array.from_buffers(kind, rows, [valid, held], missing)
    values = pa.Array.from_buffers(kind.value_type, rows * _numbers(kind), [None, held], 0)
    stored = pa.Array.from_buffers(kind.storage_type, rows, [valid], missing, children=[values])
    return pa.ExtensionArray.from_storage(kind, stored)


def _value_type(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if isinstance(kind, pa.FixedShapeTensorType) else kind


def _numbers(kind: pa.DataType) -> int:
    """Return the number of values in a row."""
    return math.prod(kind.shape) if isinstance(kind, pa.FixedShapeTensorType) else 1


class TableLayout:
    """The places of a table's columns in memory."""

    def __init__(self, schema: pa.Schema, rows: int) -> None:
        self._schema = schema.serialize().to_pybytes()
        self._rows = rows
        self._missing = _after(_HEAD.size + len(self._schema), 8 * len(schema))
        self.columns: list[tuple[range, range]] = []
        end = self._missing.stop
        for column in schema:
            there = _after(end, -(-rows // 8))
            bits = rows * _numbers(column.type) * _value_type(column.type).bit_width
            values = _after(there.stop, -(-bits // 8))
            self.columns.append((there, values))
            end = values.stop
        self.size = end
        """Bytes."""

    def missing(self, memory: memoryview) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The number of missing values of each column, as an array of that memory."""
        return np.frombuffer(memory[self._missing.start : self._missing.stop], np.int64)

    def write_head(self, memory: memoryview) -> None:
        """Write the magic bytes, the number of rows, and the schema."""
        _HEAD.pack_into(memory, 0, _MAGIC, self._rows, len(self._schema))
        memory[_HEAD.size : _HEAD.size + len(self._schema)] = self._schema


class TableWriter:
    """Copies the parts of a table to their places."""

    def __init__(self, layout: TableLayout, memory: memoryview) -> None:
        """
        Args:
            layout: of the table.
            memory: of the layout's size, all zeros.
        """
        layout.write_head(memory)
        octets = np.frombuffer(memory, np.uint8)
        self._columns = [
            (octets[there.start : there.stop], octets[values.start : values.stop])
            for there, values in layout.columns
        ]
        self._missing = layout.missing(memory)
        self._row = 0

    def append(self, part: pa.Table) -> None:
        """Add the next rows, which have the table's schema."""
        for number, column in enumerate(part.columns):
            row = self._row
            for chunk in column.chunks:
                self._copy(number, row, chunk)
                row += len(chunk)
        self._row += part.num_rows

    def _copy(self, number: int, row: int, chunk: pa.Array) -> None:
        there, values = self._columns[number]
        if chunk.null_count and not self._missing[number]:
            _set_bits(there, 0, np.ones(row, np.bool_))
        self._missing[number] += chunk.null_count
        if self._missing[number]:
            _set_bits(there, row, chunk.is_valid().to_numpy(zero_copy_only=False))
        if isinstance(chunk.type, pa.FixedShapeTensorType):
            row *= _numbers(chunk.type)
            chunk = _flat(chunk)
        if pa.types.is_boolean(chunk.type):
            _set_bits(values, row, chunk.fill_null(False).to_numpy(zero_copy_only=False))
        elif len(chunk):
            width = chunk.type.bit_width // 8
            held = np.frombuffer(chunk.buffers()[1], np.uint8)
            held = held[chunk.offset * width : (chunk.offset + len(chunk)) * width]
            values[row * width : (row + len(chunk)) * width] = held


def _flat(chunk: pa.FixedShapeTensorArray) -> pa.Array:
    """The numbers of all rows, also of missing ones."""
    size = _numbers(chunk.type)
    numbers = chunk.storage.values.slice(chunk.storage.offset * size, len(chunk) * size)
    if not numbers.null_count:
        return numbers
    check_numbers(chunk, None)
    # Missing tensors have places, too.
    return numbers.fill_null(False if pa.types.is_boolean(numbers.type) else 0)


def _set_bits(octets: Octets, first: int, bits: np.ndarray[Any, np.dtype[np.bool_]]) -> None:
    """Set bits in Arrow's order, beginning with bit `first`. They must be 0 before."""
    start, lead = divmod(first, 8)
    packed = np.packbits(np.concatenate([np.zeros(lead, np.bool_), bits]), bitorder="little")
    octets[start : start + len(packed)] |= packed


def _after(end: int, size: int) -> range:
    start = -(-end // _ALIGNMENT) * _ALIGNMENT
    return range(start, start + size)
