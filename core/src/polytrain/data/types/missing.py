"""Notes in a schema of the columns in which values are missing.

NumPy has no missing whole number, truth value or tensor: an array of them has another type where a
value is missing. Which batches hold such a row is chance, so the whole column is noted, and has
that type in all batches. Numbers that lists lack are noted too.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple, TypeAlias

import pyarrow as pa

from polytrain.data.types.nested import (
    has_fixed_shape,
    innermost,
    is_list,
    is_list_of_numbers,
    numbers_in,
)

_ROWS = b"polytrain.missing"
_NUMBERS = b"polytrain.missing_in_lists"
_TRUE = b"true"


class InLists(NamedTuple):
    """The lists of a column lack numbers."""

    column: str


Missing: TypeAlias = str | InLists
"""A column in which values are missing, or in whose lists they are."""


def noted(schema: pa.Schema, missing: Collection[Missing]) -> pa.Schema:
    """The schema, with notes at these columns of what is missing there."""
    fields = []
    for field in schema:
        notes = dict(field.metadata or {})
        if field.name in missing:
            notes[_ROWS] = _TRUE
        if InLists(field.name) in missing:
            notes[_NUMBERS] = _TRUE
        fields.append(field.with_metadata(notes) if notes else field)
    return pa.schema(fields)


def may_be_missing(field: pa.Field) -> bool:
    """Whether a column has a note that values are missing."""
    return (field.metadata or {}).get(_ROWS) == _TRUE


def may_lack_numbers(field: pa.Field) -> bool:
    """Whether a column has a note that its lists lack numbers."""
    return (field.metadata or {}).get(_NUMBERS) == _TRUE


def missing_in(schema: pa.Schema) -> set[Missing]:
    """What is missing by the notes in a schema. Columns without a type have no values at all."""
    return {
        *(each.name for each in schema if may_be_missing(each) or pa.types.is_null(each.type)),
        *(InLists(each.name) for each in schema if may_lack_numbers(each)),
    }


def decides_type(kind: pa.DataType) -> bool:
    """Whether an array of these values has another type if one is missing."""
    if pa.types.is_dictionary(kind):
        return decides_type(kind.value_type)
    return bool(
        _is_whole_or_truth(kind)
        or isinstance(kind, pa.FixedShapeTensorType)
        or (is_list_of_numbers(kind) and has_fixed_shape(kind))
    )


def decides_type_in_lists(kind: pa.DataType) -> bool:
    """Whether arrays of these lists have another type if they lack a number."""
    return is_list(kind) and _is_whole_or_truth(innermost(kind))


def found_missing(table: pa.Table) -> set[Missing]:
    """Find the columns of a table in which values are missing, where that decides a type."""
    found: set[Missing] = set()
    for field, column in zip(table.schema, table.columns, strict=True):
        if (decides_type(field.type) or pa.types.is_null(field.type)) and has_missing(column):
            found.add(field.name)
        if decides_type_in_lists(field.type) and lacks_numbers(column):
            found.add(InLists(field.name))
    return found


def has_missing(column: pa.ChunkedArray) -> bool:
    """Whether a value is missing, be it the category that is."""
    if column.null_count:
        return True
    return pa.types.is_dictionary(column.type) and any(
        chunk.dictionary.null_count for chunk in column.chunks
    )


def lacks_numbers(column: pa.ChunkedArray) -> bool:
    """Whether lists, nested to any depth, lack a number."""
    return any(numbers_in(chunk).null_count for chunk in column.chunks)


def _is_whole_or_truth(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_boolean(kind))
