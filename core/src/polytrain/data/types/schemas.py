"""Chooses the columns of a data set, and brings parts that differ to the same types."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from polytrain.data.types.nested import dimensions_of, nested_list_type, tensors_as_lists
from polytrain.data_errors import ReadError, SourceError, one_line
from polytrain_plugins import column_remedy


def columns_to_count(
    columns: Sequence[str] | None, names: list[str], *, elsewhere: Collection[str], of: str
) -> list[str]:
    """The columns of a file that are read to count its rows and find their types.

    Args:
        columns: what the user asks for; None for all.
        names: what the file has.
        elsewhere: columns that the file need not have.
        of: the file, for the message.

    Returns:
        The file's own columns among those; if there is none, its first: rows are counted all the
        same.

    Raises:
        SourceError: a column is missing, or asked for twice.
    """
    if columns is None:
        return names
    own = [name for name in columns if name in names or name not in elsewhere]
    return chosen(own, names, of=of) if own else names[:1]


def chosen(columns: Sequence[str], names: Sequence[str], *, of: str = "") -> list[str]:
    """The columns that a user asks for, which must all be there.

    Args:
        columns: what the user asks for.
        names: what there is.
        of: the file that they are looked for in, for the message.

    Raises:
        SourceError: a column is missing, or asked for twice.
    """
    if isinstance(columns, str) or not all(isinstance(column, str) for column in columns):
        raise SourceError(f"columns={columns!r} is no list of names", 'Pass columns=["…", …]')
    if not columns:
        raise SourceError("columns is empty", "Name at least one column, or leave columns out")
    if repeated := twice(columns):
        raise SourceError(f"columns names {repeated} more than once", "Name each column once")
    for column in columns:
        if column not in names:
            raise SourceError(
                f"{of or 'it'} has no column {column!r}", column_remedy(column, names)
            )
    return list(columns)


def twice(names: Sequence[str]) -> list[str]:
    """The names that are there more than once."""
    return (
        sorted({name for name in names if list(names).count(name) > 1})
        if (len(set(names)) < len(names))
        else []
    )


def refuse_repeated(names: Sequence[str], where: str) -> None:
    """Refuse columns of the same name."""
    if repeated := twice(names):
        raise SourceError(
            f"{where} has more than one column {', '.join(map(repr, repeated))}",
            "Give each column a name of its own",
        )


def subschema(schema: pa.Schema, names: Sequence[str]) -> pa.Schema:
    """The schema of these columns alone."""
    return pa.schema([schema.field(name) for name in names])


_INDEX = re.compile(r"__index_level_\d+__|Unnamed: 0(\.\d+)*")
"""The names that Arrow and pandas give to the column of an index without a name."""


def index_columns(schema: pa.Schema) -> tuple[str, ...]:
    """The columns that hold the index of a DataFrame; none if there are no others.

    Pandas' notes name them in Parquet and Arrow. Where these are lost, an index without a name is
    known by its column's name: in CSV files it is the first column, with an empty name.
    """
    try:
        noted = json.loads((schema.metadata or {})[b"pandas"])["index_columns"]
    except (KeyError, TypeError, ValueError):
        # None, or not as pandas writes them.
        noted = ()
    known = [name for name in noted if isinstance(name, str)] if isinstance(noted, list) else []
    found = tuple(
        name
        for number, name in enumerate(schema.names)
        if name in known or _INDEX.fullmatch(name) or (name == "" and number == 0)
    )
    return found if len(found) < len(schema.names) else ()


def columns_to_read(
    schema: pa.Schema, columns: Sequence[str] | None, *, of: str = ""
) -> tuple[list[str], tuple[str, ...]]:
    """The columns that are read, and those that are left out because they hold an index.

    Args:
        schema: of what there is.
        columns: what the user asks for; None for all but an index.
        of: where the columns are looked for, for the message.

    Raises:
        SourceError: a column is missing, or asked for twice.
    """
    if columns is not None:
        return chosen(columns, schema.names, of=of), ()
    index = index_columns(schema)
    return without(schema.names, index), index


def without(names: Sequence[str], left_out: Collection[str]) -> list[str]:
    """The names but for these."""
    return [name for name in names if name not in left_out]


def unified_type(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """The type that holds the values of both without loss; None if there is none."""
    if one == other or pa.types.is_null(other):
        return one
    if pa.types.is_null(one):
        return other
    if isinstance(one, pa.FixedShapeTensorType) or isinstance(other, pa.FixedShapeTensorType):
        return _type_of_both_tensors(one, other)
    for decimal, floats in ((one, other), (other, one)):
        if pa.types.is_decimal(decimal) and pa.types.is_floating(floats):
            # Arrow would take the narrower float, and rounds decimals in their last place.
            return None
    try:
        return (
            pa.unify_schemas(
                [pa.schema([pa.field("x", kind)]) for kind in (one, other)],
                promote_options="permissive",
            )
            .field("x")
            .type
        )
    except pa.ArrowException:
        pass
    plain = [kind.value_type if pa.types.is_dictionary(kind) else kind for kind in (one, other)]
    if plain != [one, other]:
        # Categories in one file, plain values in another.
        return unified_type(*plain)
    return None


def merged_type(
    name: str, one: pa.DataType, other: pa.DataType, places: tuple[str, str], remedy: str
) -> pa.DataType:
    """The type that holds the values of both without loss.

    Args:
        name: the column's.
        one: its type in one place.
        other: its type in another.
        places: both, for the message.
        remedy: what to do if there is no such type.

    Raises:
        SourceError: there is none.
    """
    both = unified_type(one, other)
    if both is None:
        raise two_types(name, one, other, places, remedy)
    return both


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
        table: what was read.
        schema: what is wanted.
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
        if isinstance(column.type, pa.FixedShapeTensorType):
            return _conformed_tensors(column, field.type)
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
    cast = column.cast(kind)
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


def _conformed_tensors(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    if not isinstance(kind, pa.FixedShapeTensorType):
        return tensors_as_lists(column).cast(kind)
    if kind.shape != column.type.shape:
        # Arrow's own cast would take the numbers and forget how they lie.
        raise pa.ArrowInvalid(f"their shape is {tuple(column.type.shape)}")
    return column.cast(kind)
