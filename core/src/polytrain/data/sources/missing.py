"""Columns in which values are missing, as far as that is known before rows are read.

NumPy has no missing whole number, truth value or tensor: an array of them has another type where a
value is missing. Which batches hold such a row is chance, so the whole column is noted in the
schema, and has that type in all batches.
"""

from __future__ import annotations

from collections.abc import Collection

import pyarrow as pa

_NOTE = (b"polytrain.missing", b"true")


def noted(schema: pa.Schema, names: Collection[str]) -> pa.Schema:
    """The schema, with a note at the columns of these names that values are missing there."""
    return pa.schema([_noted(field) if field.name in names else field for field in schema])


def may_be_missing(field: pa.Field) -> bool:
    """Whether a column has such a note."""
    return (field.metadata or {}).get(_NOTE[0]) == _NOTE[1]


def decides_type(kind: pa.DataType) -> bool:
    """Whether an array of these values has another type if one is missing."""
    if pa.types.is_dictionary(kind):
        return decides_type(kind.value_type)
    return bool(
        pa.types.is_integer(kind)
        or pa.types.is_boolean(kind)
        or isinstance(kind, pa.FixedShapeTensorType)
    )


def found_missing(table: pa.Table) -> set[str]:
    """The columns of a table in which values are missing, of those where it makes a difference."""
    return {
        field.name
        for field, column in zip(table.schema, table.columns, strict=True)
        if (decides_type(field.type) or pa.types.is_null(field.type)) and has_missing(column)
    }


def has_missing(column: pa.ChunkedArray) -> bool:
    """Whether a value is missing, be it the category that is."""
    if column.null_count:
        return True
    return pa.types.is_dictionary(column.type) and any(
        chunk.dictionary.null_count for chunk in column.chunks
    )


def _noted(field: pa.Field) -> pa.Field:
    return field.with_metadata({**(field.metadata or {}), _NOTE[0]: _NOTE[1]})
