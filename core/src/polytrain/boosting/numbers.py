"""Converts Arrow columns to numbers."""

from __future__ import annotations

from collections.abc import Collection
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
    for index, field in enumerate(table.schema):
        kind = _known(field.type) if field.name in chosen else None
        if kind is not None:
            table = table.set_column(index, field.name, table.column(index).cast(kind, safe=False))
    return table


def _known(kind: pa.DataType) -> pa.DataType | None:
    if pa.types.is_float16(kind):
        return pa.float32()
    if pa.types.is_decimal(kind) or pa.types.is_null(kind):
        return pa.float64()
    return None
