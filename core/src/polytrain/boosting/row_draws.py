"""Draws random rows by their number in the whole data set: the split into shards has no effect.

Each rank draws for its own rows, with the same result as one process. The functions are pure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

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
        size: maximum size of the sample.
        seed: seed of the draw.

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
        rows: number of rows to draw for.

    Returns:
        A mask of shape `[rows]`.
    """
    block, skipped = divmod(first, _PER_BLOCK)
    generator = np.random.Philox(key=np.array([seed, round_], dtype=np.uint64))
    generator.advance(block)
    numbers = np.random.Generator(generator).random(skipped + rows, dtype=np.float32)
    return numbers[skipped:] < rate


def of_rows(objective: Objective, rows: Mask) -> Objective:
    """Return an objective whose gradients and hessians are 0 for rows that aren't drawn.

    Args:
        objective: the user's objective, which may ignore weights.
        rows: mask of the drawn rows, of shape `[rows]`.
    """

    def partial(scores: Any, train: Any) -> tuple[Any, Any]:
        found = (np.asarray(each) for each in objective(scores, train))
        gradient, hessian = (each * rows.reshape(-1, *[1] * (each.ndim - 1)) for each in found)
        return gradient, hessian

    return partial
