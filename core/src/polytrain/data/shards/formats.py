"""Batches in the formats that users ask for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from polytrain.data.shards.lists import is_list_of_numbers, joined, lists_to_numpy


def to_format(table: pa.Table, batch_format: str) -> Any:
    """A batch as "arrow", "pandas" or "numpy" (a dict of column names to arrays).

    Arrays share the table's memory where they can.
    """
    if batch_format == "arrow":
        return table
    if batch_format == "pandas":
        return table.to_pandas()
    return {
        name: column_to_numpy(column)
        for name, column in zip(table.column_names, table.columns, strict=True)
    }


def column_to_numpy(column: pa.ChunkedArray) -> np.ndarray[Any, Any]:
    """A column as an array, without a copy where there can be one.

    Returns:
        `(rows,)`; `(rows, …)` for tensors and for lists of one shape; `(rows,)` objects, arrays or
        None, for lists that differ.
    """
    if isinstance(column.type, pa.FixedShapeTensorType):
        shape = tuple(column.type.shape)
        chunks = [_tensor_to_numpy(chunk, shape) for chunk in column.chunks]
        if not chunks:
            return np.empty((0, *shape), dtype=column.type.value_type.to_pandas_dtype())
        return chunks[0] if len(chunks) == 1 else np.concatenate(chunks)
    if is_list_of_numbers(column.type):
        return lists_to_numpy(column)
    array: np.ndarray[Any, Any] = column.to_numpy()
    return array


def batch_of(parts: Sequence[np.ndarray[Any, Any]], kind: pa.DataType) -> np.ndarray[Any, Any]:
    """Rows of several arrays of `column_to_numpy`, one after another, as memory of their own.

    A shard's memory is shared and can't be written to, which torch warns about; a batch can.
    """
    if is_list_of_numbers(kind):
        return joined(parts, own=True)
    return parts[0].copy() if len(parts) == 1 else np.concatenate(parts)


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


def empty_table(schema: pa.Schema) -> pa.Table:
    """No rows of these columns. `Schema.empty_table` knows no tensors."""
    columns = [
        pa.ExtensionArray.from_storage(field.type, pa.array([], field.type.storage_type))
        if isinstance(field.type, pa.BaseExtensionType)
        else pa.array([], field.type)
        for field in schema
    ]
    return pa.table(columns, schema=schema)
