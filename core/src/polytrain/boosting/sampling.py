"""One sample of all ranks' rows, the same on every rank however the rows are split."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from polytrain.boosting.categories import Gather
from polytrain.boosting.row_draws import sample_of


def agreed_sample(
    mine: pa.Table, *, first_row: int, rows: int, size: int, seed: int, gather: Gather
) -> pa.Table:
    """A sample of the whole data set. In an order of its own where it is all rows.

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
    # A part of the rows depends on their order anyway.
    return sample.take(_order(sample)) if rows <= size else sample


def _order(table: pa.Table) -> pa.Array:
    """Of rows by their values, the last column's first."""
    keys = pa.Table.from_arrays(
        [_sortable(column) for column in reversed(table.columns)],
        names=[str(number) for number in range(table.num_columns)],
    )
    return pc.sort_indices(keys, sort_keys=[(name, "ascending") for name in keys.column_names])


def _sortable(column: pa.ChunkedArray) -> pa.ChunkedArray:
    if pa.types.is_dictionary(column.type):
        # All have the same lists.
        return pa.chunked_array([chunk.indices for chunk in column.chunks], pa.int32())
    return column
