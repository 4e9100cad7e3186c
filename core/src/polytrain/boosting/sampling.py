"""Draws random rows: the same on every rank, however the rows are split.

A row is drawn by its number in the whole data set, so each rank draws for its own rows, with the
same result as one process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from polytrain.boosting.booster import Booster
from polytrain.boosting.columns import Gather, plainly_typed

Mask = np.ndarray[Any, np.dtype[np.bool_]]
Rates = np.ndarray[Any, np.dtype[np.float64]]
Positions = np.ndarray[Any, np.dtype[np.int64]]

Objective = Callable[[Any, Any], tuple[Any, Any]]
"""A user's objective: takes scores and a data set, returns each row's gradient and hessian."""

_PER_BLOCK = 8
"""Number of float32 values that Philox makes for each value of its counter."""


def sample_of(rows: int, size: int, seed: int) -> Positions:
    """Draw a stratified sample: one row from each of `size` equal parts.

    Args:
        rows: number of rows of the whole data set.

    Returns:
        Distinct row numbers, int64, ascending; all rows if there are at most `size`.
    """
    if rows <= size:
        return np.arange(rows)
    ends = np.arange(size + 1, dtype=np.int64) * rows // size
    return np.random.default_rng(seed).integers(ends[:-1], ends[1:])


def drawn(rate: float | Rates, *, seed: int, round_: int, first: int, rows: int) -> Mask:
    """Draw the rows of a round's sample, each with its probability.

    The generator is Philox, whose counter can be set: Salmon et al., "Parallel random numbers: as
    easy as 1, 2, 3", SC 2011.

    Args:
        rate: the probability of all rows, or one for each row, shape `[rows]`.
        seed: the run's seed, the same in all rounds.
        round_: number of the round, from 0.
        first: number of the first row in the whole data set.

    Returns:
        A mask of shape `[rows]`.
    """
    block, skipped = divmod(first, _PER_BLOCK)
    generator = np.random.Philox(key=np.array([seed, round_], dtype=np.uint64))
    generator.advance(block)
    numbers = np.random.Generator(generator).random(skipped + rows, dtype=np.float32)
    return numbers[skipped:] < rate


def of_rows(objective: Objective, rows: Mask, *, order: Literal["C", "F"]) -> Objective:
    """Return an objective whose gradients and hessians are 0 for rows that aren't drawn.

    Args:
        objective: the user's objective, which may ignore weights.
        rows: mask of the drawn rows, of shape `[rows]`.
        order: how the framework reads several scores of a row from a flat array: row by row, "C",
            or class by class, "F".
    """

    def drawn_of(values: Any) -> Any:
        values = np.asarray(values)
        scores = values.size // max(1, len(rows))
        by_row = values.reshape(len(rows), scores, order=order)
        return (by_row * rows[:, np.newaxis]).reshape(values.shape, order=order)

    def partial(scores: Any, train: Any) -> tuple[Any, Any]:
        gradient, hessian = map(drawn_of, objective(scores, train))
        return gradient, hessian

    return partial


@dataclass(frozen=True, slots=True, kw_only=True)
class RowNumbers:
    """Where a rank's rows and queries begin in the whole data set. Numbers count from 0."""

    first_row: int
    first_query: int
    total_rows: int


def agreed_numbers(*, rows: int, queries: int, rank: int, gather: Gather) -> RowNumbers:
    """Number the rows and queries of all ranks, in the order of ranks.

    Args:
        queries: number of this rank's queries; 0 without queries.
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
    plain = plainly_typed(table, table.column_names)
    keys = pa.Table.from_arrays(
        [_sortable(column) for column in reversed(plain.columns)],
        names=[str(number) for number in range(table.num_columns)],
    )
    return pc.sort_indices(keys, sort_keys=[(name, "ascending") for name in keys.column_names])


def _sortable(column: pa.ChunkedArray) -> pa.ChunkedArray:
    if pa.types.is_dictionary(column.type):
        # All chunks have the same list.
        return pa.chunked_array([chunk.indices for chunk in column.chunks], pa.int32())
    return column
