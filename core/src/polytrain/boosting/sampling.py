"""Draws one sample of all ranks' rows: the same on every rank, however the rows are split."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from polytrain.boosting.booster import Booster
from polytrain.boosting.categories import Gather
from polytrain.boosting.row_draws import sample_of


@dataclass(frozen=True, slots=True, kw_only=True)
class RowNumbers:
    """Where a rank's rows and queries begin in the whole data set. Numbers count from 0."""

    first_row: int
    """Number of the rank's first row."""

    first_query: int
    """Number of the rank's first query."""

    total_rows: int
    """Number of rows of the whole data set."""


def agreed_numbers(*, rows: int, queries: int, rank: int, gather: Gather) -> RowNumbers:
    """Number the rows and queries of all ranks, in the order of ranks.

    Args:
        rows: number of this rank's rows.
        queries: number of this rank's queries; 0 without queries.
        rank: this rank.
        gather: gathers an object from all ranks, which all call this function.
    """
    counts = np.array(gather([rows, queries]))
    first_row, first_query = counts[:rank].sum(axis=0).tolist()
    total = int(counts[:, 0].sum())
    return RowNumbers(first_row=first_row, first_query=first_query, total_rows=total)


def agreed_sample(
    mine: pa.Table, numbers: RowNumbers, options: Booster, *, gather: Gather
) -> pa.Table:
    """Return the rows to make bins from. If these are all rows, they are sorted.

    Args:
        mine: this rank's rows; columns of numbers, or Arrow dictionaries with equal lists.
        numbers: the numbers of these rows in the whole data set.
        options: the options, which give the sample's size and seed.
        gather: gathers an object from all ranks.
    """
    rows, size = numbers.total_rows, options.bin_sample_rows
    chosen = sample_of(rows, size, options.seed)
    first = numbers.first_row
    low, high = np.searchsorted(chosen, [first, first + len(mine)])
    parts = gather(mine.take(pa.array(chosen[low:high] - first)))
    sample = pa.concat_tables(parts).combine_chunks()
    # A smaller sample depends on the order of rows anyway.
    return sample.take(_order(sample)) if rows <= size else sample


def _order(table: pa.Table) -> pa.Array:
    """Return the order of rows by their values, the last column first."""
    keys = pa.Table.from_arrays(
        [_sortable(column) for column in reversed(table.columns)],
        names=[str(number) for number in range(table.num_columns)],
    )
    return pc.sort_indices(keys, sort_keys=[(name, "ascending") for name in keys.column_names])


def _sortable(column: pa.ChunkedArray) -> pa.ChunkedArray:
    if pa.types.is_dictionary(column.type):
        # All chunks have the same list.
        return pa.chunked_array([chunk.indices for chunk in column.chunks], pa.int32())
    return column
