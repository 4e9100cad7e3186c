"""The rows of all ranks, leaf by leaf: for leaves that are quantiles of residuals."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from polytrain.boosting.numbers import Numbers


def rows_by_leaf(leaves: Numbers) -> Iterator[tuple[int, Numbers]]:
    """Yield each leaf that has rows, and its rows' numbers in ascending order.

    Args:
        leaves: the leaf of each row, shape `[rows]`.
    """
    order = np.argsort(leaves, kind="stable")
    found, starts = np.unique(leaves[order], return_index=True)
    yield from zip(map(int, found), np.split(order, starts[1:]), strict=True)
