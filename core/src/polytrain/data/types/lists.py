"""Columns of lists of numbers as arrays: one array if all lists have one shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from polytrain.data.types.nested import has_fixed_shape, is_list
from polytrain.data_errors import ReadError

Array = np.ndarray[Any, Any]


def lists_to_numpy(column: pa.ChunkedArray) -> Array:
    """Convert a column of lists to the form of `joined`, without a copy if possible."""
    return joined([_stacked_or_rows(chunk) for chunk in column.chunks], own=False)


def lists_by_type(column: pa.ChunkedArray) -> Array:
    """Convert a column of lists to a form that depends on its type alone.

    Returns:
        `(rows, size, …)` for lists of a fixed size; otherwise `(rows,)` objects: an array for each
        list, None for a missing one.
    """
    return lists_to_numpy(column) if has_fixed_shape(column.type) else lists_by_row(column)


def lists_by_row(column: pa.ChunkedArray) -> Array:
    """Convert a column of lists to `(rows,)` objects: an array per list, None if it is missing."""
    return objects([row for chunk in column.chunks for row in _rows(chunk)])


def with_objects(array: Array) -> Array:
    """Turn the numbers of lists into objects, one of which may be None."""
    if array.dtype != object:
        return array.astype(object)
    return objects([None if row is None else row.astype(object) for row in array])


def joined(parts: Sequence[Array], *, own: bool) -> Array:
    """Join the rows of several arrays.

    Args:
        parts: arrays `(rows, length, …)`, or `(rows,)` objects that are arrays or None.
        own: whether the result may share no memory with the parts.

    Returns:
        `(rows, length, …)` if all lists have one shape, `(rows,)` objects otherwise.
    """
    parts = [part for part in parts if len(part)] or list(parts[:1])
    if not parts:
        return np.empty((0, 0))
    if all(part.dtype != object for part in parts) and len({part.shape[1:] for part in parts}) == 1:
        if len(parts) > 1:
            return np.concatenate(parts)
        return parts[0].copy() if own else parts[0]
    rows = [row for part in parts for row in part]
    return _stacked_rows(rows) if own else objects(rows)


def check_numbers(tensors: pa.FixedShapeTensorArray, name: str | None) -> None:
    """Check that no tensor lacks some of its numbers. Whole tensors may be missing.

    Args:
        name: of the column; None if it isn't known.

    Raises:
        ReadError: one lacks numbers.
    """
    if tensors.storage.flatten().null_count:
        where = "" if name is None else f" of the column {name!r}"
        raise ReadError(
            f"a tensor{where} lacks some of its numbers, which no array has a place for. Fill them "
            "in where the data are written"
        )


def objects(rows: Sequence[Any]) -> Array:
    """Return an array of these objects, also if they are arrays of one shape."""
    found = np.empty(len(rows), dtype=object)
    for number, row in enumerate(rows):
        found[number] = row
    return found


def _stacked_rows(rows: Sequence[Any]) -> Array:
    """Copy rows, to one array if they have one shape."""
    if _have_one_shape(rows):
        return np.stack(rows)
    return objects([row.copy() if isinstance(row, np.ndarray) else row for row in rows])


def _have_one_shape(rows: Sequence[Any]) -> bool:
    return (
        len(rows) > 0
        and all(isinstance(row, np.ndarray) and row.dtype != object for row in rows)
        and len({row.shape for row in rows}) == 1
    )


def _stacked_or_rows(array: pa.Array) -> Array:
    stacked = _stacked(array)
    return objects(_rows(array)) if stacked is None else stacked


def _stacked(array: pa.Array) -> Array | None:
    """Convert lists of one shape to one array; None if they differ, or one is missing."""
    if not is_list(array.type):
        return _numbers(array)
    if array.null_count:
        return None
    size = array.type.list_size if pa.types.is_fixed_size_list(array.type) else _length(array)
    if size is None:
        return None
    items = _stacked(array.flatten())
    return None if items is None else items.reshape(len(array), size, *items.shape[1:])


def _length(array: pa.Array) -> int | None:
    """The length of all lists; None if they differ."""
    if not len(array):
        return 0
    ends = pc.min_max(pc.list_value_length(array))
    return int(ends["min"].as_py()) if ends["min"] == ends["max"] else None


def _rows(array: pa.Array) -> list[Any]:
    """An array for each list, None for a missing one."""
    lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
    stops = np.cumsum(lengths, dtype=np.int64)
    items = array.flatten()  # without the values of missing lists
    values = _rows(items) if is_list(items.type) else _numbers(items)
    there = array.is_valid().to_pylist()
    found = []
    for stop, length, is_there in zip(stops.tolist(), lengths.tolist(), there, strict=True):
        part = values[stop - length : stop]
        if isinstance(part, list):
            part = np.stack(part) if _have_one_shape(part) else objects(part)
        found.append(part if is_there else None)
    return found


def _numbers(array: pa.Array) -> Array:
    numbers: Array = array.to_numpy(zero_copy_only=False)
    return numbers
