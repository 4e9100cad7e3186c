"""Converts predictions to columns of a table, beside their rows' key columns. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from polytrain_plugins import Predictions


def joined(parts: Sequence[Predictions]) -> Predictions:
    """Join the predictions of consecutive rows."""
    first = parts[0]
    if isinstance(first, Mapping):
        by_name = [part for part in parts if isinstance(part, Mapping)]
        return {name: np.concatenate([part[name] for part in by_name]) for name in first}
    return parts[0] if len(parts) == 1 else np.concatenate(parts)  # type: ignore[arg-type]  # all are of one kind


def checked(predictions: Predictions, rows: int) -> Predictions:
    """Return the predictions if there is one for each row.

    Raises:
        ValueError: there are more or fewer.
    """
    arrays = predictions if isinstance(predictions, Mapping) else {"": predictions}
    for name, array in arrays.items():
        found = array.shape[0] if array.ndim else "no"
        if found != rows:
            of = f" of {name!r}" if name else ""
            raise ValueError(
                f"The model returned {found} predictions{of} for {rows} rows. Return an array "
                "whose first axis is the rows"
            )
    return predictions


def as_table(predictions: Predictions, keys: pa.Table, *, prediction_column: str) -> pa.Table:
    """Return a table with the key columns, followed by the predictions.

    Args:
        predictions: an array `(rows, …)`, or several by name.
        keys: key columns, with as many rows.
        prediction_column: name of the column of a single array; several have their own names.

    Raises:
        ValueError: a key column has the name of predictions.
    """
    if not isinstance(predictions, Mapping):
        predictions = {prediction_column: predictions}
    for name, array in predictions.items():
        if name in keys.column_names:
            raise ValueError(
                f"keep: {name!r} is also the name of predictions of the model. Leave it out of "
                "keep, or have the model return a different name"
            )
        keys = keys.append_column(str(name), _column(array))
    return keys


def _column(array: np.ndarray[Any, Any]) -> pa.Array:
    """Return a column of numbers, of lists of one length, or of tensors."""
    array = np.ascontiguousarray(array)
    if array.ndim == 1:
        return pa.array(array)
    if array.ndim == 2:
        return pa.FixedSizeListArray.from_arrays(pa.array(array.reshape(-1)), array.shape[1])
    return pa.FixedShapeTensorArray.from_numpy_ndarray(array)
