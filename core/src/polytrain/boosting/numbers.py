"""Columns as numbers, whatever Arrow's type for them is."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import pyarrow as pa

Numbers = np.ndarray[Any, Any]


def floats(column: pa.ChunkedArray) -> Numbers:
    """float64, shape `[rows]`; NaN where there is no value. No copy, if it is that already."""
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    numbers: Numbers = column.cast(pa.float64(), safe=False).to_numpy()
    return numbers


def plainly_typed(table: pa.Table, columns: Collection[str]) -> pa.Table:
    """The table with these columns in types that frameworks know, where there is one that holds
    the same numbers: for half-precision numbers, decimals, and columns without any value."""
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
