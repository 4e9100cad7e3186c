"""Tables in anonymous memory that several processes map. It is freed with its last process.

A table of plain columns lies in one piece, into which its parts are copied as they come: who reads
files into it needs memory for one more part only, and who maps it gets every column in one chunk.
The memory has `_HEAD`, the schema, and the number of missing values of each column. Then follow,
for each column, Arrow's validity bits and its values. If no value is missing, the bits are never
written and take no memory. Any other table is an Arrow file.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from polytrain.data.types.columns import empty_table
from polytrain.data.types.nested import check_numbers
from polytrain.data.types.schemas import in_one_piece


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """A part of the memory of a file descriptor."""

    offset: int
    size: int
    """Bytes."""


def to_shared_memory(table: pa.Table) -> int:
    """Write a table into shared memory. Return its file descriptor."""
    return _filled(lambda file: _write(table, file))


def parts_to_shared_memory(parts: Iterator[pa.Table], schema: pa.Schema, rows: int) -> int:
    """Write a table that comes in parts into shared memory. Return its file descriptor.

    Args:
        parts: consecutive rows, with the schema's columns.
    """
    if not _is_plain(schema):
        return to_shared_memory(_joined([empty_table(schema), *parts]))
    layout = _TableLayout(schema, rows)
    descriptor = os.memfd_create("polytrain-data")
    try:
        os.ftruncate(descriptor, layout.size)
        writer = _TableWriter(layout, memoryview(mmap.mmap(descriptor, layout.size)))
        for part in parts:
            # The import of what casts takes longer than most parts do.
            writer.append(part if part.schema.equals(schema) else part.cast(schema))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _joined(parts: list[pa.Table]) -> pa.Table:
    """Join parts column by column, so that only one column is in memory twice. Empties `parts`."""
    columns, fields = [], []
    while parts[0].num_columns:
        column = pa.table(
            [pa.chunked_array([chunk for part in parts for chunk in part.column(0).chunks])],
            schema=pa.schema([parts[0].schema.field(0)]),
        )
        parts[:] = [part.remove_column(0) for part in parts]
        column = in_one_piece(column)
        columns.append(column.column(0))
        fields.append(column.schema.field(0))
    return pa.table(columns, schema=pa.schema(fields))


def to_buffer(table: pa.Table) -> pa.Buffer:
    """Write a table into a buffer, as `to_shared_memory` does into shared memory."""
    sink = pa.BufferOutputStream()
    _write(table, sink)
    return sink.getvalue()


def bytes_to_shared_memory(data: bytes | memoryview) -> int:
    """Write bytes into shared memory. Return its file descriptor."""
    return _filled(lambda file: file.write(data))


def from_shared_memory(descriptor: int, extent: Extent | None = None) -> pa.Table:
    """Map a table that another process has written, without a copy."""
    memory = mapped(descriptor, extent)
    if _is_laid_out(memory):
        return _laid_out(memory)
    return pa.ipc.open_file(pa.py_buffer(memory)).read_all()


def mapped(descriptor: int, extent: Extent | None = None) -> memoryview:
    """Map the memory of a descriptor, all of it or an extent, for reading."""
    if extent is None:
        extent = Extent(offset=0, size=os.fstat(descriptor).st_size)
    if extent.size == 0:
        return memoryview(b"")
    # Mappings begin at pages.
    before = extent.offset % mmap.ALLOCATIONGRANULARITY
    pages = mmap.mmap(
        descriptor, before + extent.size, prot=mmap.PROT_READ, offset=extent.offset - before
    )
    return memoryview(pages)[before:]


def _filled(fill: Callable[[BinaryIO], object]) -> int:
    descriptor = os.memfd_create("polytrain-data")
    try:
        # The file gets a descriptor of its own, since it closes what it was given.
        with os.fdopen(os.dup(descriptor), "wb") as file:
            fill(file)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _write(table: pa.Table, file: object) -> None:
    # An Arrow file has one numbering of a column's categories, and rows of one chunk are found at
    # once.
    table = in_one_piece(table)
    with pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


_HEAD = struct.Struct("<8sqq")
"""`_MAGIC`, rows, bytes of the schema."""

_MAGIC = b"PTTABLE1"
_ALIGNMENT = 64

Octets = np.ndarray[Any, np.dtype[np.uint8]]


def _is_plain(schema: pa.Schema) -> bool:
    """Whether all columns are numbers, booleans, times, or tensors of them."""
    return all(pa.types.is_primitive(_value_type(column.type)) for column in schema)


def _is_laid_out(memory: memoryview) -> bool:
    """Whether memory begins with such a table."""
    return bytes(memory[: len(_MAGIC)]) == _MAGIC


def _laid_out(memory: memoryview) -> pa.Table:
    """Return the table in memory, without a copy."""
    _, rows, size = _HEAD.unpack_from(memory)
    buffer = pa.py_buffer(memory)
    schema = pa.ipc.read_schema(buffer.slice(_HEAD.size, size))
    layout = _TableLayout(schema, rows)
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


class _TableLayout:
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


class _TableWriter:
    """Copies the parts of a table to their places."""

    def __init__(self, layout: _TableLayout, memory: memoryview) -> None:
        """
        Args:
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
