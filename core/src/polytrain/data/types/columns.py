"""Batches in the formats that users ask for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from polytrain.data.types.lists import (
    check_numbers,
    joined,
    lists_by_row,
    lists_by_type,
    lists_to_numpy,
    objects,
    with_numbers,
    with_objects,
)
from polytrain.data.types.missing import (
    decides_type,
    decides_type_in_lists,
    has_fixed_shape,
    has_missing,
    innermost,
    is_list_of_numbers,
    lacks_numbers,
    may_be_missing,
    may_lack_numbers,
    numbers_in,
)
from polytrain.data.types.wide_types import without_missing_categories
from polytrain.data_errors import ReadError

Parts: TypeAlias = Sequence[np.ndarray[Any, Any]]
"""Rows of a column, one after another."""

Combine: TypeAlias = Callable[[Parts], np.ndarray[Any, Any]]
"""Makes one array of them, with memory of its own."""


def to_format(table: pa.Table, batch_format: str) -> Any:
    """A batch as "arrow", "pandas" or "numpy" (a dict of column names to arrays).

    Arrays share the table's memory where they can. A column's type depends on the table's schema
    alone, and so is the same in all batches.

    Raises:
        ReadError: a value is missing, or doesn't fit, and nothing was known of it.
    """
    if batch_format == "arrow":
        return table
    if batch_format == "pandas":
        return _to_pandas(table)
    return {
        field.name: column_to_numpy(column, field)
        for field, column in zip(table.schema, table.columns, strict=True)
    }


def column_to_numpy(column: pa.ChunkedArray, field: pa.Field | None = None) -> np.ndarray[Any, Any]:
    """A column as an array, without a copy where there can be one.

    Args:
        column: some of its rows.
        field: its name, and whether values are missing in any of its rows; by default, whether they
            are in these.

    Returns:
        `(rows,)`; `(rows, …)` for tensors and for lists of one shape; `(rows,)` objects, arrays or
        None, for lists that differ and for tensors of which some are missing.

    Raises:
        ReadError: a value is missing, or doesn't fit, and nothing was known of it.
    """
    kind = column.type
    array: np.ndarray[Any, Any]
    if pa.types.is_floating(kind):
        # Most columns: without the questions that follow.
        array = column.to_numpy()
        return array
    if is_list_of_numbers(kind):
        return lists_of_numbers(column, field)
    if _holds_fields(kind):
        # As Python's values: Arrow would round whole numbers beside missing ones.
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
) -> np.ndarray[Any, Any]:
    """A column of lists as `column_to_numpy` has it.

    Args:
        column: some of its rows.
        field: as there.
        by_type: only lists of a fixed size become one array, whatever the others' shapes are.

    Raises:
        ReadError: as there.
    """
    kind = column.type
    lacks = decides_type_in_lists(kind) and _lacks_numbers(column, field)
    if lacks and pa.types.is_integer(innermost(kind)):
        column = _floats(column, field)
    array: np.ndarray[Any, Any]
    if decides_type(kind) and _missing(column, field):
        array = lists_by_row(column)
    else:
        array = lists_by_type(column) if by_type else lists_to_numpy(column)
    return with_objects(array) if lacks and pa.types.is_boolean(innermost(kind)) else array


def combiner(kind: pa.DataType) -> Combine:
    """How a batch's column of this type is made from arrays of `column_to_numpy`.

    A shard's memory is shared and can't be written to, which torch warns about; a batch's can.
    Choose once for many batches: to find out what a type is takes longer than to copy the rows.
    """
    if is_list_of_numbers(kind):
        return _fixed_lists if has_fixed_shape(kind) else _lists
    return _tensors_or_objects if isinstance(kind, pa.FixedShapeTensorType) else _values


def _values(parts: Parts) -> np.ndarray[Any, Any]:
    return parts[0].copy() if len(parts) == 1 else np.concatenate(parts)


def _lists(parts: Parts) -> np.ndarray[Any, Any]:
    return joined(parts, own=True)


def _fixed_lists(parts: Parts) -> np.ndarray[Any, Any]:
    return _rows_or_none(parts) if parts[0].dtype == object else joined(parts, own=True)


def _tensors_or_objects(parts: Parts) -> np.ndarray[Any, Any]:
    return _rows_or_none(parts) if parts[0].dtype == object else _values(parts)


def _rows_or_none(parts: Parts) -> np.ndarray[Any, Any]:
    """Where rows are missing somewhere, so that no batch is one array."""
    return objects([None if row is None else row.copy() for part in parts for row in part])


def _to_pandas(table: pa.Table) -> Any:
    truths, arrays = [], {}
    for index, field in enumerate(table.schema):
        if pa.types.is_time64(field.type):
            arrays[index] = column_to_numpy(table.column(index), field)
            table = table.set_column(index, field.name, pa.nulls(table.num_rows))
            continue
        if pa.types.is_dictionary(field.type):
            known = without_missing_categories(table.column(index))
            table = table.set_column(index, field, known)
            continue
        if isinstance(field.type, pa.FixedShapeTensorType) or _has_own_frames(table, index):
            # Arrow would give pandas tensors without their shape, and lists as floats if the table
            # has a row without one, or a list without a number.
            rows = column_to_numpy(table.column(index), field)
            arrays[index] = objects([None if row is None else row.copy() for row in rows])
            table = table.set_column(index, field.name, pa.nulls(table.num_rows))
            continue
        if not decides_type(field.type):
            continue
        column = table.column(index)
        missing = _missing(column, field)
        if missing and pa.types.is_integer(field.type):
            table = table.set_column(index, field.name, _floats(column, field))
        elif missing and pa.types.is_boolean(field.type):
            truths.append(index)
    # Numbers within structs, which otherwise would be floats.
    frame = table.to_pandas(integer_object_nulls=True)
    for index in truths:
        frame.isetitem(index, frame.iloc[:, index].astype(object))
    for index, rows in arrays.items():
        frame.isetitem(index, rows)
    return frame


def _has_own_frames(table: pa.Table, index: int) -> bool:
    field = table.schema.field(index)
    return is_list_of_numbers(field.type) and (
        pa.types.is_fixed_size_list(field.type)
        or may_lack_numbers(field)
        or (decides_type_in_lists(field.type) and lacks_numbers(table.column(index)))
    )


def _missing(column: pa.ChunkedArray, field: pa.Field | None) -> bool:
    """Whether values are missing in the data set; where nothing says so, none must be here."""
    if field is not None and may_be_missing(field):
        return True
    if has_missing(column):
        if field is not None:
            raise _unknown(f"the column {field.name!r} of type {field.type} has rows")
        return True
    return False


def _lacks_numbers(column: pa.ChunkedArray, field: pa.Field | None) -> bool:
    """The same of the lists of a column."""
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


def _scalars(
    column: pa.ChunkedArray, field: pa.Field | None, *, missing: bool
) -> np.ndarray[Any, Any]:
    """Whole numbers or truth values."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if missing and pa.types.is_integer(column.type):
        column = _floats(column, field)
    array: np.ndarray[Any, Any] = column.to_numpy()
    return array.astype(object) if missing and array.dtype == bool else array


def _floats(column: pa.ChunkedArray, field: pa.Field | None) -> pa.ChunkedArray:
    """Whole numbers, or lists of them, of which some are missing."""
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


def _times_of_day(column: pa.ChunkedArray, field: pa.Field | None) -> np.ndarray[Any, Any]:
    try:
        array: np.ndarray[Any, Any] = column.to_numpy()
    except pa.ArrowInvalid as error:
        name = "" if field is None else f" {field.name!r}"
        raise ReadError(
            f"the column{name} has times of day with nanoseconds, for which Python's have no "
            'place. Round them to microseconds, or read batches with format="arrow"'
        ) from error
    return array


def _categories(column: pa.ChunkedArray) -> np.ndarray[Any, Any]:
    """The categories' own values; one object serves all rows of a category."""
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


def _tensors(
    column: pa.ChunkedArray, field: pa.Field | None, *, missing: bool
) -> np.ndarray[Any, Any]:
    for chunk in column.chunks:
        check_numbers(chunk, None if field is None else field.name)
    if missing:
        return objects([row for chunk in column.chunks for row in _tensors_or_none(chunk)])
    chunks = [_tensor_to_numpy(chunk) for chunk in column.chunks]
    if not chunks:
        shape = _in_order(column.type, column.type.shape)
        return np.empty((0, *shape), dtype=column.type.value_type.to_pandas_dtype())
    return chunks[0] if len(chunks) == 1 else np.concatenate(chunks)


def _tensors_or_none(chunk: pa.FixedShapeTensorArray) -> list[np.ndarray[Any, Any] | None]:
    there = chunk.is_valid()
    # What flattening leaves out is missing rows alone.
    values = iter(_tensor_to_numpy(chunk.filter(there)))
    return [next(values) if is_there else None for is_there in there.to_pylist()]


def _tensor_to_numpy(chunk: pa.FixedShapeTensorArray) -> np.ndarray[Any, Any]:
    array: np.ndarray[Any, Any]
    kind = chunk.type
    if kind.value_type == pa.bool_():
        # Arrow packs booleans into bits, which are no tensor to it.
        array = chunk.storage.flatten().to_numpy(zero_copy_only=False).reshape(-1, *kind.shape)
        array = array.transpose(0, *_in_order(kind, range(1, array.ndim)))
    else:
        array = chunk.to_numpy_ndarray()
    return array


def _in_order(kind: pa.FixedShapeTensorType, axes: Sequence[int]) -> list[int]:
    """What is given for the axes as they are stored, for the axes of the tensor."""
    return [axes[axis] for axis in kind.permutation or range(len(axes))]


def empty_table(schema: pa.Schema) -> pa.Table:
    """No rows of these columns. `Schema.empty_table` knows no tensors."""
    columns = [
        pa.ExtensionArray.from_storage(field.type, pa.array([], field.type.storage_type))
        if isinstance(field.type, pa.BaseExtensionType)
        else pa.array([], field.type)
        for field in schema
    ]
    return pa.table(columns, schema=schema)
