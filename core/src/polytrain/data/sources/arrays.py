"""Arrays, of whatever library, as columns."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from polytrain.data.sources.errors import SourceError, one_line

_REMEDY = "Give an array with a row for each example, of numbers, booleans or strings"


def table_of(arrays: Mapping[Any, Any]) -> pa.Table:
    """Arrays of equal length by name, as a table.

    Raises:
        SourceError: one can't become a column, or they differ in length.
    """
    columns = {str(name): column_of(str(name), value) for name, value in arrays.items()}
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name}: {length}" for name, length in lengths.items())
        raise SourceError(f"its arrays differ in length ({listed})", "Give all the same length")
    return pa.table(columns)


def column_of(name: str, value: Any) -> pa.Array | pa.ChunkedArray:
    """An array of one dimension as a column, of more as a column of tensors.

    Raises:
        SourceError: neither will do.
    """
    if isinstance(value, pa.Array | pa.ChunkedArray):
        return value
    try:
        # A tensor that has a gradient refuses to become an array.
        array = np.asarray(value.detach() if hasattr(value, "detach") else value)
        if array.ndim == 1:
            return pa.array(array)
    except (pa.ArrowException, TypeError, ValueError, RuntimeError) as error:
        raise SourceError(f"{name!r} can't become a column: {one_line(error)}", _REMEDY) from error
    if array.ndim == 0 or array.dtype.kind not in "iufb":
        what = f"{name!r} is an array of shape {array.shape} and type {array.dtype}"
        raise SourceError(what, _REMEDY)
    if array.size == 0:
        if len(array) == 0:
            # A column of no tensors: Arrow can't make one from an empty array.
            return pa.array([], pa.null())
        raise SourceError(f"{name!r} has rows without values: its shape is {array.shape}", _REMEDY)
    return tensors_of(array)


def tensors_of(array: np.ndarray[Any, Any]) -> pa.FixedShapeTensorArray:
    """An array `(rows, …)` of numbers or booleans as a column; there may be no rows."""
    # Arrow's own from_numpy_ndarray refuses no rows, and one row that was given its axis by
    # np.newaxis.
    shape = array.shape[1:]
    values = pa.array(np.ascontiguousarray(array).reshape(-1))
    storage = pa.FixedSizeListArray.from_arrays(values, math.prod(shape))
    return pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(values.type, shape), storage)
