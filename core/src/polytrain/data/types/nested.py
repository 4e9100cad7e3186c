"""Types made of others (lists, structs, maps, categories), and lists of numbers as arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from polytrain.data_errors import ReadError

_LISTS = {kind(pa.null()).id for kind in (pa.list_, pa.large_list, partial(pa.list_, list_size=1))}


def with_parts(kind: pa.DataType, changed: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    """The type with its parts changed: items of lists, keys, fields, categories."""
    if isinstance(kind, pa.BaseExtensionType):
        return kind

    def part(field: pa.Field) -> pa.Field:
        return field.with_type(changed(field.type))

    if pa.types.is_fixed_size_list(kind):
        return pa.list_(part(kind.value_field), kind.list_size)
    if pa.types.is_large_list(kind):
        return pa.large_list(part(kind.value_field))
    if pa.types.is_list(kind):
        return pa.list_(part(kind.value_field))
    if pa.types.is_map(kind):
        return pa.map_(part(kind.key_field), part(kind.item_field), keys_sorted=kind.keys_sorted)
    if pa.types.is_struct(kind):
        return pa.struct([part(field) for field in kind])
    if pa.types.is_dictionary(kind):
        return pa.dictionary(kind.index_type, changed(kind.value_type), ordered=kind.ordered)
    return kind


def is_list_of_numbers(kind: pa.DataType) -> bool:
    """Whether values of a type are lists, nested to any depth, of numbers or booleans."""
    numbers = innermost(kind)
    is_number = pa.types.is_integer(numbers) or pa.types.is_floating(numbers)
    return is_list(kind) and bool(is_number or pa.types.is_boolean(numbers))


def is_list(kind: pa.DataType) -> bool:
    """Whether values of a type are lists."""
    return kind.id in _LISTS


def gives_containers(kind: pa.DataType) -> bool:
    """Whether arrays have dicts, lists or arrays of objects as the values of a type."""
    if isinstance(kind, pa.BaseExtensionType):
        return not isinstance(kind, pa.FixedShapeTensorType) and gives_containers(kind.storage_type)
    return pa.types.is_nested(kind) and not is_list_of_numbers(kind)


def has_fixed_shape(kind: pa.DataType) -> bool:
    """Whether the type alone says that all lists have one shape."""
    return not is_list(kind) or (
        pa.types.is_fixed_size_list(kind) and has_fixed_shape(kind.value_type)
    )


def innermost(kind: pa.DataType) -> pa.DataType:
    """The type of what is in lists, nested to any depth."""
    return innermost(kind.value_type) if is_list(kind) else kind


def with_numbers(kind: pa.DataType, numbers: pa.DataType) -> pa.DataType:
    """The type of the same lists with other numbers."""
    if not is_list(kind):
        return numbers
    return with_parts(kind, lambda part: with_numbers(part, numbers))


def numbers_in(array: pa.Array) -> pa.Array:
    """The numbers of lists, nested to any depth, without what missing lists may hold."""
    return numbers_in(array.flatten()) if is_list(array.type) else array


def nested_list_type(dimensions: int, values: pa.DataType) -> pa.DataType:
    """The type of lists that are nested so often."""
    return pa.large_list(nested_list_type(dimensions - 1, values)) if dimensions else values


def dimensions_of(kind: pa.DataType) -> tuple[int, pa.DataType]:
    """The number of dimensions of tensors or nested lists, and the type of their values."""
    if isinstance(kind, pa.FixedShapeTensorType):
        return len(kind.shape), kind.value_type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        dimensions, values = dimensions_of(kind.value_type)
        return dimensions + 1, values
    return 0, kind


def tensors_of(array: np.ndarray[Any, Any]) -> pa.FixedShapeTensorArray:
    """An array `(rows, …)` of numbers or booleans as a column; there may be no rows."""
    # Arrow's own from_numpy_ndarray refuses no rows, and one row that was given its axis by
    # np.newaxis.
    shape = array.shape[1:]
    values = pa.array(np.ascontiguousarray(array).reshape(-1))
    storage = pa.FixedSizeListArray.from_arrays(values, math.prod(shape))
    return pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(values.type, shape), storage)


def nested_lists(
    rows: Sequence[np.ndarray[Any, Any] | None], dimensions: int, values: pa.DataType
) -> pa.Array:
    """Arrays of different shapes as a column of nested lists.

    Args:
        rows: an array for each row; None for a missing one.
        dimensions: of each array, at least 1.
        values: the type of the numbers.
    """
    nothing = np.empty((0,) * dimensions)
    arrays = [nothing if row is None else row for row in rows]
    shapes = np.array([array.shape for array in arrays], np.int64).reshape(-1, dimensions)
    flat = [np.ravel(array) for array in arrays if array.size]
    column = pa.array(np.concatenate(flat) if flat else [], values)
    missing = pa.array([row is None for row in rows], pa.bool_())
    for dimension in reversed(range(dimensions)):
        # A list for each row of the dimensions outside of this one.
        lists = shapes[:, :dimension].prod(axis=1)
        lengths = np.repeat(shapes[:, dimension], lists)
        offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int64())
        mask = missing if dimension == 0 else None
        column = pa.LargeListArray.from_arrays(offsets, column, mask=mask)
    return column


def tensors_as_lists(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """A column of tensors as one of nested lists, in which other shapes have a place too."""
    kind = column.type
    chunks = []
    for chunk in column.chunks:
        lists = chunk.storage.flatten()
        for size in reversed(kind.shape):
            offsets = np.arange(0, len(lists) + 1, size)
            lists = pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), lists)
        chunks.append(lists)
    return pa.chunked_array(chunks, nested_list_type(len(kind.shape), kind.value_type))


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
    return objects([_copied(row) for row in rows])


def _copied(row: Any) -> Any:
    """An array with memory of its own, also if it is one of arrays."""
    if not isinstance(row, np.ndarray):
        return row
    return objects([*map(_copied, row)]) if row.dtype == object else row.copy()


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
