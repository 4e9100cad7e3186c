"""JAX on polytrain: `jax.distributed` over all workers, new for each attempt.

Importing this package imports no JAX; calling `mean_over_workers` does.
"""

from __future__ import annotations

from typing import Any

from polytrain_jax.backend import Jax
from polytrain_plugins import Backend, hookimpl

__all__ = ["Jax", "mean_over_workers"]


def mean_over_workers(tree: Any, *, weight: float = 1.0) -> Any:
    """The mean of every array of a tree over all workers, weighted.

    Args:
        tree: of the same arrays on every worker, such as gradients.
        weight: of this worker's, such as its rows in the batch.
    """
    from polytrain_jax.engine import weighted_mean

    return weighted_mean(tree, weight)


@hookimpl
def polytrain_backends() -> list[type[Backend]]:
    """What the entry point of this module provides."""
    return [Jax]
