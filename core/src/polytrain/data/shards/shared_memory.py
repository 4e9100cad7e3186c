"""Tables in anonymous memory that several processes map. It is freed with its last process."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

import pyarrow as pa

from polytrain.data.shards.layout import TableLayout, TableWriter, is_laid_out, is_plain, laid_out
from polytrain.data.types.columns import empty_table
from polytrain.data.types.wide_types import in_one_piece


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
        schema: of the table.
        rows: number of rows of all parts.
    """
    if not is_plain(schema):
        return to_shared_memory(_joined([empty_table(schema), *parts]))
    layout = TableLayout(schema, rows)
    descriptor = os.memfd_create("polytrain-data")
    try:
        os.ftruncate(descriptor, layout.size)
        writer = TableWriter(layout, memoryview(mmap.mmap(descriptor, layout.size)))
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
    if is_laid_out(memory):
        return laid_out(memory)
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
    # The file gets a descriptor of its own, since it closes what it was given.
    with os.fdopen(os.dup(descriptor), "wb") as file:
        fill(file)
    return descriptor


def _write(table: pa.Table, file: object) -> None:
    # An Arrow file has one numbering of a column's categories, and rows of one chunk are found at
    # once.
    table = in_one_piece(table)
    with pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
