"""A shard in a trainer: handed over in shared memory, and iterated over in batches."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import pyarrow as pa

from polytrain.data.plan import batch_rows
from polytrain_plugins import BatchFormat, Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardInfo:
    """One rank's part of a data set, without its rows."""

    name: str
    total_rows: int
    most_rows: int
    """Rows of the rank that has the most."""

    fewest_rows: int
    """Rows of the rank that has the fewest."""


def to_shared_memory(table: pa.Table) -> int:
    """Write a table into anonymous shared memory and return its file descriptor.

    The memory has no name: it is gone when the last process that has the descriptor is.
    """
    descriptor = os.memfd_create("polytrain-shard")
    # The sink gets a descriptor of its own, since it closes what it was given.
    with (
        os.fdopen(os.dup(descriptor), "wb") as file,
        pa.ipc.new_file(file, table.schema) as writer,
    ):
        # Files may number their categories differently; here a column has one numbering.
        writer.write_table(table.unify_dictionaries())
    return descriptor


def from_shared_memory(descriptor: int) -> pa.Table:
    """Map the table that another process has written. Nothing is copied."""
    return pa.ipc.open_file(pa.memory_map(f"/proc/self/fd/{descriptor}")).read_all()


class TableShard(Shard):
    """A shard whose rows lie in one Arrow table."""

    def __init__(self, table: pa.Table, info: ShardInfo) -> None:
        self.name = info.name
        self.total_rows = info.total_rows
        self._table = table
        self._info = info

    def __len__(self) -> int:
        return int(self._table.num_rows)

    @property
    def schema(self) -> pa.Schema:
        return self._table.schema

    def to_arrow(self) -> pa.Table:
        return self._table

    def to_pandas(self) -> Any:
        return self._table.to_pandas()

    def iter_batches(
        self,
        *,
        batch_size: int = 256,
        batch_format: BatchFormat = "numpy",
        drop_last: bool = False,
    ) -> Iterator[Any]:
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: give at least 1")
        if batch_format not in get_args(BatchFormat):
            raise ValueError(f"batch_format={batch_format!r}: give one of {get_args(BatchFormat)}")
        return self._batches(batch_size, batch_format, drop_last)

    def _batches(self, batch_size: int, batch_format: str, drop_last: bool) -> Iterator[Any]:
        info = self._info
        for rows in batch_rows(
            len(self), info.most_rows, info.fewest_rows, batch_size, drop_last=drop_last
        ):
            batch = self._table.slice(rows.start, len(rows))
            if batch_format == "arrow":
                yield batch
            elif batch_format == "pandas":
                yield batch.to_pandas()
            else:
                yield {name: column_to_numpy(batch.column(name)) for name in batch.column_names}


def column_to_numpy(column: pa.ChunkedArray) -> np.ndarray[Any, Any]:
    """A column as an array: `(rows,)`, or `(rows, …)` for a column of tensors."""
    if isinstance(column.type, pa.FixedShapeTensorType):
        shape = tuple(column.type.shape)
        chunks = [_tensor_to_numpy(chunk, shape) for chunk in column.chunks]
        if not chunks:
            return np.empty((0, *shape), dtype=column.type.value_type.to_pandas_dtype())
        return chunks[0] if len(chunks) == 1 else np.concatenate(chunks)
    array: np.ndarray[Any, Any] = column.to_numpy()
    return array


def _tensor_to_numpy(
    chunk: pa.FixedShapeTensorArray, shape: tuple[int, ...]
) -> np.ndarray[Any, Any]:
    array: np.ndarray[Any, Any]
    if chunk.type.value_type == pa.bool_():
        # Arrow packs booleans into bits, which are no tensor to it.
        array = chunk.storage.flatten().to_numpy(zero_copy_only=False).reshape(-1, *shape)
    else:
        array = chunk.to_numpy_ndarray()
    return array
