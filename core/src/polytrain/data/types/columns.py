"""Arrow columns as NumPy arrays, and tables as batches in the formats that users request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from polytrain.data.types.nested import (
    Array,
    check_numbers,
    has_fixed_shape,
    innermost,
    is_list_of_numbers,
    joined,
    lists_by_row,
    lists_by_type,
    lists_to_numpy,
    numbers_in,
    objects,
    with_numbers,
    with_objects,
)
from polytrain.data.types.plain import (
    decides_type,
    decides_type_in_lists,
    has_missing,
    lacks_numbers,
    may_be_missing,
    may_lack_numbers,
)
from polytrain.data.types.schemas import without_missing_categories
from polytrain.data_errors import ReadError

Parts: TypeAlias = Sequence[Array]
"""Rows of a column, one after another."""

Combine: TypeAlias = Callable[[Parts], Array]
"""Joins parts to one array, in memory of its own."""


def to_format(table: pa.Table, batch_format: str) -> Any:
    """Convert a table to "arrow", "pandas" or "numpy" (a dict of column names to arrays).

    Arrays share the table's memory if possible. The type of an array depends on the table's schema
    alone, so it is the same in all batches.

    Raises:
        ReadError: a value is missing that the schema has no note of, or doesn't fit.
    """
    if batch_format == "arrow":
        return table
    if batch_format == "pandas":
        return _to_pandas(table)
    return {
        field.name: column_to_numpy(column, field)
        for field, column in zip(table.schema, table.columns, strict=True)
    }


def column_to_numpy(column: pa.ChunkedArray, field: pa.Field | None = None) -> Array:
    """Convert rows of a column to an array, without a copy if possible.

    Args:
        field: its name, and the note whether values are missing in other rows. Without it, only
            these rows count.

    Returns:
        `(rows,)`; `(rows, …)` for tensors and for lists of one shape; `(rows,)` objects, arrays or
        None, for lists that differ, and for tensors if some are missing.

    Raises:
        ReadError: a value is missing that the field has no note of, or doesn't fit.
    """
    kind = column.type
    array: Array
    if pa.types.is_floating(kind):
        # Most columns need no further checks.
        array = column.to_numpy()
        return array
    if is_list_of_numbers(kind):
        return lists_of_numbers(column, field)
    if _holds_fields(kind):
        # Python's values: Arrow would round whole numbers beside missing ones.
        return objects(column.to_pylist())
    if decides_type(kind):
        missing = _missing(column, field)
        if isinstance(kind, pa.FixedShapeTensorType):
            return _tensors(column, field, missing=missing)
        return _scalars(column, field, missing=missing)
    if pa.types.is_dictionary(kind):
        return _categories(column)
    if pa.types.is_time64(kind):
        return _times_of_day(column, field)
    array = column.to_numpy()
    return array


def lists_of_numbers(
    column: pa.ChunkedArray, field: pa.Field | None = None, *, by_type: bool = False
) -> Array:
    """Convert a column of lists; see `column_to_numpy`.

    Args:
        by_type: whether only lists of a fixed size become one array. Otherwise other lists of one
            shape do so, too.

    Raises:
        ReadError: see `column_to_numpy`.
    """
    kind = column.type
    lacks = decides_type_in_lists(kind) and _lacks_numbers(column, field)
    if lacks and pa.types.is_integer(innermost(kind)):
        column = _floats(column, field)
    array: Array
    if decides_type(kind) and _missing(column, field):
        array = lists_by_row(column)
    else:
        array = lists_by_type(column) if by_type else lists_to_numpy(column)
    return with_objects(array) if lacks and pa.types.is_boolean(innermost(kind)) else array


def combiner(kind: pa.DataType) -> Combine:
    """Return the function that joins arrays of `column_to_numpy` for columns of a type.

    A shard's memory is shared and can't be written to, which torch warns about; a batch's can.
    Choose once for many batches: checking a type takes longer than copying the rows.
    """
    if is_list_of_numbers(kind) and not has_fixed_shape(kind):
        return partial(joined, own=True)
    is_nested = is_list_of_numbers(kind) or isinstance(kind, pa.FixedShapeTensorType)
    return _arrays_of_one_shape if is_nested else _scalars_joined


def _scalars_joined(parts: Parts) -> Array:
    return parts[0].copy() if len(parts) == 1 else np.concatenate(parts)


def _arrays_of_one_shape(parts: Parts) -> Array:
    """Join rows; as objects if rows are missing somewhere, so that no batch is one array."""
    if parts[0].dtype == object:
        return _copied(row for part in parts for row in part)
    return joined(parts, own=True)


def _copied(rows: Iterable[Array | None]) -> Array:
    return objects([None if row is None else row.copy() for row in rows])


def _to_pandas(table: pa.Table) -> Any:
    arrays: dict[int, Array] = {}
    for index, field in enumerate(table.schema):
        column = table.column(index)
        if pa.types.is_dictionary(field.type):
            table = table.set_column(index, field, without_missing_categories(column))
        elif _differs_in_pandas(column, field):
            array = column_to_numpy(column, field)
            is_scalar = pa.types.is_primitive(field.type)
            arrays[index] = array.copy() if is_scalar else _copied(array)
            table = table.set_column(index, field.name, pa.nulls(table.num_rows))
    # Whole numbers in structs would be floats otherwise.
    frame = table.to_pandas(integer_object_nulls=True)
    for index, array in arrays.items():
        frame.isetitem(index, array)
    return frame


def _differs_in_pandas(column: pa.ChunkedArray, field: pa.Field) -> bool:
    """Whether Arrow would convert a column to other values for pandas than for NumPy.

    It drops the shape of tensors, turns lists into floats if the table lacks one of their numbers,
    and chooses the types of columns by the missing values of this table alone.
    """
    kind = field.type
    if is_list_of_numbers(kind):
        return (
            pa.types.is_fixed_size_list(kind)
            or may_lack_numbers(field)
            or (decides_type_in_lists(kind) and lacks_numbers(column))
        )
    if pa.types.is_time64(kind) or isinstance(kind, pa.FixedShapeTensorType):
        return True
    return decides_type(kind) and _missing(column, field)


def _missing(column: pa.ChunkedArray, field: pa.Field | None) -> bool:
    """Whether values are missing in the data set. Without a note, none may be missing here."""
    if field is not None and may_be_missing(field):
        return True
    if has_missing(column):
        if field is not None:
            raise _unknown(f"the column {field.name!r} of type {field.type} has rows")
        return True
    return False


def _lacks_numbers(column: pa.ChunkedArray, field: pa.Field | None) -> bool:
    """Whether lists lack numbers in the data set. Without a note of it, none may do so here."""
    if field is not None and may_lack_numbers(field):
        return True
    if lacks_numbers(column):
        if field is not None:
            raise _unknown(f"the lists of the column {field.name!r} have places")
        return True
    return False


def _unknown(what: str) -> ReadError:
    return ReadError(
        f"{what} without a value. The data didn't say so when the run began, and earlier batches "
        "may already have had another type. Fill in the values where the data are written, write "
        'float64, or read batches with format="arrow"'
    )


def _holds_fields(kind: pa.DataType) -> bool:
    """Whether values are structs or maps, or lists of them."""
    numbers = innermost(kind)
    return bool(pa.types.is_struct(numbers) or pa.types.is_map(numbers))


def _scalars(column: pa.ChunkedArray, field: pa.Field | None, *, missing: bool) -> Array:
    """Convert whole numbers or truth values."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if missing and pa.types.is_integer(column.type):
        column = _floats(column, field)
    array: Array = column.to_numpy()
    return array.astype(object) if missing and array.dtype == bool else array


def _floats(column: pa.ChunkedArray, field: pa.Field | None) -> pa.ChunkedArray:
    """Cast whole numbers, or lists of them, because some are missing."""
    try:
        return column.cast(with_numbers(column.type, pa.float64()))
    except pa.ArrowInvalid as error:
        numbers = pa.chunked_array([numbers_in(chunk) for chunk in column.chunks])
        largest = max(pc.min_max(numbers).as_py().values(), key=abs)
        name = "" if field is None else f" {field.name!r}"
        raise ReadError(
            f"the column{name} lacks values, so that its whole numbers become float64, which "
            f"would round {largest}. Fill the missing values in, write the column as a string, or "
            'read batches with format="arrow"'
        ) from error


def _times_of_day(column: pa.ChunkedArray, field: pa.Field | None) -> Array:
    try:
        array: Array = column.to_numpy()
    except pa.ArrowInvalid as error:
        name = "" if field is None else f" {field.name!r}"
        raise ReadError(
            f"the column{name} has times of day with nanoseconds, for which Python's have no "
            'place. Round them to microseconds, or read batches with format="arrow"'
        ) from error
    return array


def _categories(column: pa.ChunkedArray) -> Array:
    """Convert categories to their values; all rows of a category share one object."""
    parts = []
    for chunk in column.chunks:
        values = chunk.dictionary.to_numpy(zero_copy_only=False)
        if chunk.indices.null_count and values.dtype != object:
            return column_to_numpy(column.cast(column.type.value_type))
        indices = pc.fill_null(chunk.indices.cast(pa.int64()), len(values))
        if chunk.indices.null_count:
            values = objects([*values, None])
        parts.append(values[indices.to_numpy()])
    if not parts:
        return column_to_numpy(pa.chunked_array([], column.type.value_type))
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _tensors(column: pa.ChunkedArray, field: pa.Field | None, *, missing: bool) -> Array:
    for chunk in column.chunks:
        check_numbers(chunk, None if field is None else field.name)
    if missing:
        return objects([row for chunk in column.chunks for row in _tensors_or_none(chunk)])
    chunks = [_tensor_to_numpy(chunk) for chunk in column.chunks]
    if not chunks:
        shape = (0, *column.type.shape)
        return np.empty(shape, dtype=column.type.value_type.to_pandas_dtype())
    return chunks[0] if len(chunks) == 1 else np.concatenate(chunks)


def _tensors_or_none(chunk: pa.FixedShapeTensorArray) -> list[Array | None]:
    there = chunk.is_valid()
    # Flattening leaves out missing rows only.
    values = iter(_tensor_to_numpy(chunk.filter(there)))
    return [next(values) if is_there else None for is_there in there.to_pylist()]


def _tensor_to_numpy(chunk: pa.FixedShapeTensorArray) -> Array:
    array: Array
    kind = chunk.type
    if kind.value_type == pa.bool_():
        # Arrow packs booleans into bits, which are no tensor to it.
        array = chunk.storage.flatten().to_numpy(zero_copy_only=False).reshape(-1, *kind.shape)
    else:
        array = chunk.to_numpy_ndarray()
    return array


def empty_table(schema: pa.Schema) -> pa.Table:
    """Return a table without rows. `Schema.empty_table` fails on tensors."""
    return pa.table([pa.nulls(0, field.type) for field in schema], schema=schema)
