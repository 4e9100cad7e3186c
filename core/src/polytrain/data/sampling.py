"""One sample of all ranks' rows, the same on every rank however the rows are split."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from polytrain.data.categories import Gather
from polytrain.data.draws import sample_of


def agreed_sample(
    mine: pa.Table, *, first_row: int, rows: int, size: int, seed: int, gather: Gather
) -> pa.Table:
    """A sample of the whole data set, in an order that doesn't depend on that of its rows.

    Args:
        mine: a rank's rows; columns of numbers, or of Arrow's dictionaries with equal lists.
        first_row: number of the first of them in the whole data set.
        rows: of the whole data set.
        size: rows of the sample, at most. If there are no more, it is all of them.
        seed: of the draw.
        gather: of all ranks.
    """
    chosen = sample_of(rows, size, seed)
    low, high = np.searchsorted(chosen, [first_row, first_row + len(mine)])
    parts = gather(mine.take(pa.array(chosen[low:high] - first_row)))
    sample = pa.concat_tables(parts).combine_chunks()
    return sample.take(np.lexsort([_sortable(column) for column in sample.columns]))


def _sortable(column: pa.ChunkedArray) -> np.ndarray[Any, Any]:
    if pa.types.is_dictionary(column.type):
        column = pa.chunked_array([chunk.indices for chunk in column.chunks], pa.int32())
    if pa.types.is_boolean(column.type):
        # With some missing they would be Python's own, which have no order.
        column = column.cast(pa.int8())
    return np.asarray(column.to_numpy())
