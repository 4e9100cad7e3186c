"""Converts Arrow columns to numbers, and concatenates the arrays of all ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

Numbers = np.ndarray[Any, Any]


def floats(column: pa.ChunkedArray) -> Numbers:
    """Return a column as float64, shape `[rows]`, NaN for nulls; without a copy if possible."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    numbers: Numbers = column.cast(pa.float64(), safe=False).to_numpy()
    return numbers


def plainly_typed(table: pa.Table, columns: Collection[str]) -> pa.Table:
    """Convert half-precision, decimal and null columns to types that frameworks know.

    Other types, and columns that aren't in `columns`, stay as they are.
    """
    chosen = set(columns)
    kinds = {field.name: _known(field.type) for field in table.schema if field.name in chosen}
    return with_columns(
        table,
        {
            name: table.column(name).cast(kind, safe=False)
            for name, kind in kinds.items()
            if kind is not None
        },
    )


def without_categories(table: pa.Table, columns: Collection[str]) -> pa.Table:
    """Return the table with plain values in those of these columns that are dictionaries."""
    kinds = {name: table.schema.field(name).type for name in columns}
    return with_columns(
        table,
        {
            name: table.column(name).cast(kind.value_type)
            for name, kind in kinds.items()
            if pa.types.is_dictionary(kind)
        },
    )


def with_columns(table: pa.Table, columns: Mapping[str, Any]) -> pa.Table:
    """Return the table with these columns: they replace columns of the same name, or come last.

    It does this in one step, since each `pa.Table.set_column` copies the list of all columns.

    Args:
        columns: name → Arrow or NumPy array, shape `[rows]`.
    """
    if not columns:
        return table
    names = table.column_names
    kept = (columns.get(name, column) for name, column in zip(names, table.columns, strict=True))
    there = set(names)
    more = {name: column for name, column in columns.items() if name not in there}
    return pa.table([*kept, *more.values()], names=[*names, *more])


def one_after_another(parts: Sequence[Any]) -> Any:
    """Concatenate the ranks' arrays, in the order of ranks; None if they are None."""
    return None if parts[0] is None else np.concatenate(parts)


def rows_by_leaf(leaves: Numbers) -> Iterator[tuple[int, Numbers]]:
    """Yield each leaf that has rows, and the indices of its rows in ascending order.

    Args:
        leaves: the leaf of each row, shape `[rows]`.
    """
    order = np.argsort(leaves, kind="stable")
    found, starts = np.unique(leaves[order], return_index=True)
    yield from zip(map(int, found), np.split(order, starts[1:]), strict=True)


def _known(kind: pa.DataType) -> pa.DataType | None:
    if pa.types.is_float16(kind):
        return pa.float32()
    if pa.types.is_decimal(kind) or pa.types.is_null(kind):
        return pa.float64()
    return None
