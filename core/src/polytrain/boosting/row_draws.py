"""Random rows by their number in the whole data set: how the rows are split makes no difference.

Pure. Everybody can draw for the rows that they have, and comes to what one process would.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Mask = np.ndarray[Any, np.dtype[np.bool_]]
Rates = np.ndarray[Any, np.dtype[np.float64]]
Positions = np.ndarray[Any, np.dtype[np.int64]]

_PER_BLOCK = 8
"""Single-precision numbers from each value of Philox's counter."""


def sample_of(rows: int, size: int, seed: int) -> Positions:
    """A stratified sample: one row from each of `size` parts that are as long as each other.

    Args:
        rows: of the whole data set.
        size: of the sample, at most.
        seed: of the draw.

    Returns:
        The rows' numbers, int64, ascending, each once; all of them if there are no more.
    """
    if rows <= size:
        return np.arange(rows)
    ends = np.arange(size + 1, dtype=np.int64) * rows // size
    return np.random.default_rng(seed).integers(ends[:-1], ends[1:])


def drawn(rate: float | Rates, *, seed: int, round_: int, first: int, rows: int) -> Mask:
    """Which of the rows are in a round's sample, each by its chance.

    The numbers are Philox's, whose counter can be set: Salmon et al., "Parallel random numbers: as
    easy as 1, 2, 3", SC 2011.

    Args:
        rate: the chance, or one for each row.
        seed: of all rounds.
        round_: number of the round, from 0.
        first: number of the first row in the whole data set.
        rows: how many to draw for.

    Returns:
        Of shape `[rows]`.
    """
    block, skipped = divmod(first, _PER_BLOCK)
    generator = np.random.Philox(key=np.array([seed, round_], dtype=np.uint64))
    generator.advance(block)
    numbers = np.random.Generator(generator).random(skipped + rows, dtype=np.float32)
    return numbers[skipped:] < rate
