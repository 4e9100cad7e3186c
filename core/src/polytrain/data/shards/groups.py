"""Groups: rows that stay on one rank together, such as the candidates of one query."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from polytrain.data.read.describe import Source
from polytrain.data_errors import SourceError
from polytrain.text.described import numbered
from polytrain_plugins import column_remedy


def group_starts(source: Source, column: str) -> np.ndarray[Any, Any]:
    """Read that column, and return the first row of each group and the number of rows.

    Raises:
        SourceError: there is no such column, it has empty values, or a group's rows don't lie
            together.
    """
    if column not in source.schema.names:
        raise SourceError(
            f"it has no column {column!r} to group by",
            column_remedy(column, source.schema.names),
        )
    kind = source.schema.field(column).type
    if pa.types.is_nested(kind) or isinstance(kind, pa.BaseExtensionType):
        raise SourceError(
            f"the column {column!r} to group by is of type {kind}",
            "Group by a column of numbers, strings or times",
        )
    values = pa.chunked_array(
        [
            chunk
            for piece in source.pieces
            for chunk in piece.read(0, piece.rows, [column]).column(column).chunks
        ],
        type=source.schema.field(column).type,
    )
    missing = count_missing(values)
    if missing:
        raise SourceError(
            f"{numbered(missing, 'row', 'have')} no value in the column {column!r} to group by",
            "Give every row a group",
        )
    numbers = _numbered(values)
    starts = np.flatnonzero(np.diff(numbers, prepend=-1))
    found, counts = np.unique(numbers[starts], return_counts=True)
    if (counts > 1).any():
        torn = found[counts > 1][0]
        first, again = starts[numbers[starts] == torn][:2]
        raise SourceError(
            f"the rows of group {values[int(first)].as_py()!r} of the column {column!r} don't lie "
            f"together: it begins at row {first} and again at row {again}",
            f"Sort the data by {column!r}",
        )
    return np.append(starts, len(numbers))


def group_sizes(values: pa.ChunkedArray) -> np.ndarray[Any, Any]:
    """Return the number of rows of each group, from the column of their names."""
    starts = np.flatnonzero(np.diff(_numbered(values), prepend=-1))
    return np.diff(np.append(starts, len(values)))


def count_missing(values: pa.ChunkedArray) -> int:
    """Return how many values are null or NaN."""
    if pa.types.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
    nans = pc.sum(pc.is_nan(values)).as_py() if pa.types.is_floating(values.type) else 0
    return int(values.null_count + (nans or 0))


def _numbered(values: pa.ChunkedArray) -> np.ndarray[Any, Any]:
    """Return a number for each value: equal values have equal numbers."""
    kind = values.type
    if pa.types.is_decimal(kind) and kind.bit_width < 128:
        # Arrow doesn't encode narrower ones.
        values = values.cast(pa.decimal128(kind.precision, kind.scale))
    encoded = pc.dictionary_encode(values).unify_dictionaries()
    return np.concatenate(
        [np.empty(0, dtype=np.int64), *(chunk.indices.to_numpy() for chunk in encoded.chunks)]
    )
