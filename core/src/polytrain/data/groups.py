"""Groups: rows that belong together, such as the candidates of one query, and stay on one rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from polytrain.data.sources import Source, SourceError


def group_starts(source: Source, column: str) -> np.ndarray[Any, Any]:
    """The first row of every group, and the number of rows at the end. Reads that column only.

    Raises:
        SourceError: there is no such column, it has empty values, or a group's rows don't lie
            together.
    """
    if column not in source.schema.names:
        raise SourceError(
            f"it has no column {column!r} to group by",
            f"Its columns: {', '.join(source.schema.names)}",
        )
    values = pa.chunked_array(
        [
            chunk
            for piece in source.pieces
            for chunk in piece.read(0, piece.rows, [column]).column(column).chunks
        ],
        type=source.schema.field(column).type,
    )
    if values.null_count:
        raise SourceError(
            f"{values.null_count} row(s) have no value in the column {column!r} that groups are "
            "told by",
            "Give every row a group",
        )
    # Numbers stand for values of any type; a value has the same one wherever it occurs.
    codes = pc.dictionary_encode(values).combine_chunks()
    if isinstance(codes, pa.ChunkedArray):
        codes = codes.unify_dictionaries().combine_chunks()
    numbers = codes.indices.to_numpy()
    starts = np.flatnonzero(np.diff(numbers, prepend=-1))
    if len(starts) != len(codes.dictionary):
        _, counts = np.unique(numbers[starts], return_counts=True)
        torn = int(np.flatnonzero(counts > 1)[0])
        first, again = starts[numbers[starts] == torn][:2]
        raise SourceError(
            f"the rows of group {codes.dictionary[torn].as_py()!r} of the column {column!r} don't "
            f"lie together: it begins at row {first} and again at row {again}",
            f"Sort the data by {column!r}",
        )
    return np.append(starts, len(numbers))
