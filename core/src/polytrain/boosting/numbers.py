"""Converts Arrow columns to numbers, and puts the arrays of all ranks together."""

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
    """Return the table with half-precision numbers, decimals and columns of nulls in these columns
    converted to types that frameworks know."""
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
    """Return the table with plain values in these columns where it has pandas' type `category`."""
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
    """Return the table with these columns, in place of those of the same names or after all.

    In one step: each `pa.Table.set_column` copies the list of all columns.

    Args:
        table: the table.
        columns: name → arrays of Arrow or NumPy.
    """
    if not columns:
        return table
    names = table.column_names
    kept = (columns.get(name, column) for name, column in zip(names, table.columns, strict=True))
    there = set(names)
    more = {name: column for name, column in columns.items() if name not in there}
    return pa.table([*kept, *more.values()], names=[*names, *more])


def one_after_another(parts: Sequence[Any]) -> Any:
    """Return the ranks' arrays, by rank, as one; None if they have none."""
    return None if parts[0] is None else np.concatenate(parts)


def rows_by_leaf(leaves: Numbers) -> Iterator[tuple[int, Numbers]]:
    """Yield each leaf that has rows, and its rows' numbers in ascending order.

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
