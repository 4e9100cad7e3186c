"""Brings parts of a data set whose columns differ in type to the same types, with room for all.

Arrow's usual strings and lists end at 2 GiB of text, or as many items, in one array, and a category
of 8 bits at 128. What is read in parts, or lies in chunks, may well be more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from polytrain.data.types.nested import (
    dimensions_of,
    innermost,
    is_list,
    nested_list_type,
    numbers_in,
    tensors_as_lists,
    with_parts,
)
from polytrain.data_errors import ReadError, SourceError, one_line


def unified_type(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """The type that holds the values of both without loss; None if there is none."""
    if one == other or pa.types.is_null(other):
        return one
    if pa.types.is_null(one):
        return other
    if isinstance(one, pa.FixedShapeTensorType) or isinstance(other, pa.FixedShapeTensorType):
        return _type_of_both_tensors(one, other)
    try:
        unified = pa.unify_schemas(
            [pa.schema([pa.field("x", kind)]) for kind in (one, other)],
            promote_options="permissive",
        )
    except pa.ArrowException:
        pass
    else:
        both = unified.field("x").type
        # Beside floats, Arrow would round decimals in their last place.
        return both if _decimals(both) >= max(_decimals(one), _decimals(other)) else None
    plain = [kind.value_type if pa.types.is_dictionary(kind) else kind for kind in (one, other)]
    if plain != [one, other]:
        # Categories in one file, plain values in another.
        return unified_type(*plain)
    return None


def _decimals(kind: pa.DataType) -> int:
    """The number of a type's parts that are decimals."""
    parts = (kind.field(number).type for number in range(kind.num_fields))
    return 1 if pa.types.is_decimal(kind) else sum(map(_decimals, parts))


def merged_type(
    name: str, one: pa.DataType, other: pa.DataType, places: tuple[str, str], remedy: str
) -> pa.DataType:
    """The type that holds the values of both without loss.

    Raises:
        SourceError: there is none.
    """
    both = unified_type(one, other)
    if both is None:
        raise two_types(name, one, other, places, remedy)
    return both


def merged_schema(
    parts: Iterable[tuple[str, pa.Schema]], remedy: str, names: Sequence[str] | None = None
) -> pa.Schema:
    """The schema that holds the rows of all parts.

    Args:
        parts: their places, for messages, and schemas.
        names: columns, which all parts have; by default those that any has.

    Raises:
        SourceError: there is none.
    """
    types: dict[str, pa.DataType] = {}
    # The part that each type is from.
    origins: dict[str, str] = {}
    for place, schema in parts:
        for name in schema.names if names is None else names:
            own = schema.field(name).type
            before, origin = types.get(name, pa.null()), origins.get(name, place)
            both = merged_type(name, before, own, (origin, place), remedy)
            if both != before or name not in types:
                types[name], origins[name] = both, place
    return pa.schema(types.items())


def two_types(name: str, one: Any, other: Any, places: tuple[str, str], remedy: str) -> SourceError:
    """The error of a column whose types have nothing in common."""
    here, there = places
    return SourceError(f"the column {name!r} is {one} in {here} and {other} in {there}", remedy)


def _type_of_both_tensors(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """Nested lists, for tensors of different shapes."""
    (dimensions, values), (others, other_values) = dimensions_of(one), dimensions_of(other)
    both = unified_type(values, other_values)
    if dimensions != others or both is None:
        return None
    if isinstance(other, type(one)) and one.shape == other.shape:
        return pa.fixed_shape_tensor(both, one.shape)
    return nested_list_type(dimensions, both)


def conformed(
    table: pa.Table,
    schema: pa.Schema,
    where: str,
    constants: Mapping[str, Any] | None = None,
    *,
    why_missing: str = "it has changed since the run began",
) -> pa.Table:
    """The table with these columns, in these types.

    Args:
        where: where it was read, for messages.
        constants: columns that have the same value in every row, and are not in the table.
        why_missing: what a missing column means.

    Raises:
        ReadError: a column is missing, or has values that don't fit its type.
    """
    constants = constants or {}
    return pa.table(
        [
            _constant(constants[field.name], field.type, table.num_rows)
            if field.name in constants
            else _conformed(table, field, where, why_missing)
            for field in schema
        ],
        schema=schema,
    )


def _constant(value: Any, kind: pa.DataType, rows: int) -> pa.Array:
    return pa.nulls(rows, kind) if value is None else pa.repeat(pa.scalar(value, kind), rows)


def _conformed(table: pa.Table, field: pa.Field, where: str, why_missing: str) -> pa.ChunkedArray:
    index = table.schema.get_field_index(field.name)
    if index < 0:
        raise ReadError(f"{where} has no column {field.name!r}: {why_missing}")
    column = table.column(index)
    if column.type == field.type:
        return column
    if pa.types.is_null(column.type):
        return pa.chunked_array([pa.nulls(len(column), field.type)])
    if unified_type(column.type, field.type) is None:
        raise ReadError(
            f"{where} has the column {field.name!r} as {column.type}, which has nothing in common "
            f"with the type {field.type} that it has in the data set"
        )
    try:
        return exactly(column, field.type)
    except pa.ArrowException as error:
        raise ReadError(
            f"{where} has values in the column {field.name!r} that don't fit the type "
            f"{field.type}, which it has in the data set: {one_line(error)}"
        ) from error


def exactly(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    """Cast a column without loss.

    Raises:
        pa.ArrowException: it doesn't hold them. Arrow's own cast rounds some, without a word.
    """
    if isinstance(column.type, pa.FixedShapeTensorType):
        return _exact_tensors(column, kind)
    cast = column.cast(kind)
    if is_list(kind) and is_list(column.type):
        numbers = [numbers_in(chunk) for chunk in column.chunks]
        exactly(pa.chunked_array(numbers, innermost(column.type)), innermost(kind))
    if not pa.types.is_floating(kind):
        return cast
    if pa.types.is_decimal(column.type):
        raise pa.ArrowInvalid("decimals would be rounded")
    if pa.types.is_floating(column.type) and column.type.bit_width > kind.bit_width:
        differ = pc.not_equal(cast.cast(column.type), column)
        # NaN is unequal to itself.
        if pc.any(pc.and_(differ, pc.invert(pc.is_nan(column)))).as_py():
            raise pa.ArrowInvalid(f"numbers of type {column.type} would be rounded")
    return cast


def _exact_tensors(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    if not isinstance(kind, pa.FixedShapeTensorType):
        return exactly(tensors_as_lists(column), kind)
    if kind.shape != column.type.shape:
        # Arrow's own cast would take the numbers and forget how they lie.
        raise pa.ArrowInvalid(f"their shape is {tuple(column.type.shape)}")
    # Arrow has no cast from tensors to tensors of other numbers.
    numbers = pa.chunked_array([chunk.storage for chunk in column.chunks], column.type.storage_type)
    cast = exactly(numbers, kind.storage_type)
    return pa.chunked_array(
        [pa.ExtensionArray.from_storage(kind, each) for each in cast.chunks], kind
    )


LARGE = 1 << 28
"""Bytes of a column from which on its offsets get 64 bits: so many bits may be a list's items."""


def widened(table: pa.Table) -> pa.Table:
    """The table with room in its types, where its columns are large or their categories differ."""
    for index, field in enumerate(table.schema):
        column = table.column(index)
        kind = field.type
        if column.num_chunks > 1:
            kind = with_wide_categories(kind)
        if _has_offsets(kind) and column.nbytes >= LARGE:
            kind = _with_wide_offsets(kind)
        if kind != field.type:
            table = table.set_column(index, field.with_type(kind), column.cast(kind))
    return table


def in_one_piece(table: pa.Table) -> pa.Table:
    """The table with each column in one chunk."""
    for index, field in enumerate(table.schema):
        column = table.column(index)
        # Arrow doesn't unify categories of which one is missing.
        if pa.types.is_dictionary(field.type) and column.num_chunks > 1:
            table = table.set_column(index, field, without_missing_categories(column))
    return widened(table).unify_dictionaries().combine_chunks()


def without_missing_categories(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """A column of categories; values of a category that is missing are missing themselves."""
    chunks = [_without_missing_category(chunk) for chunk in column.chunks]
    return pa.chunked_array(chunks, column.type)


def _without_missing_category(chunk: pa.DictionaryArray) -> pa.DictionaryArray:
    if not chunk.dictionary.null_count:
        return chunk
    known = chunk.dictionary.is_valid()
    numbers = pc.subtract(pc.cumulative_sum(known.cast(pa.int64())), 1)
    numbers = pc.if_else(known, numbers, None).cast(chunk.indices.type)
    return pa.DictionaryArray.from_arrays(
        numbers.take(chunk.indices), chunk.dictionary.drop_null(), ordered=chunk.type.ordered
    )


def with_wide_categories(kind: pa.DataType) -> pa.DataType:
    """A type whose categories, if it has any, may be more than those of one part.

    With signed numbers, since pandas knows no others.
    """
    if pa.types.is_dictionary(kind) and (
        kind.index_type.bit_width < 32 or pa.types.is_unsigned_integer(kind.index_type)
    ):
        return pa.dictionary(pa.int32(), kind.value_type, ordered=kind.ordered)
    return kind


def _has_offsets(kind: pa.DataType) -> bool:
    return bool(_with_wide_offsets(kind) != kind)


def _with_wide_offsets(kind: pa.DataType) -> pa.DataType:
    # Of maps only keys and values: Arrow knows no map with offsets of 64 bits.
    kind = with_parts(kind, _with_wide_offsets)
    if pa.types.is_string(kind):
        return pa.large_string()
    if pa.types.is_binary(kind):
        return pa.large_binary()
    return pa.large_list(kind.value_field) if pa.types.is_list(kind) else kind
