"""Reads and writes a rank's own parts of a strategy's variables, without a collective operation."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tensorflow as tf


def by_one_rank(strategy: tf.distribute.Strategy | None) -> AbstractContextManager[Any]:
    """Return a context in which a rank reads variables without a collective operation.

    Elsewhere, the strategy sums some variables over the ranks on reading, such as metrics.
    """
    if strategy is None or strategy.num_replicas_in_sync == 1:
        return nullcontext()
    devices = len(strategy.extended.worker_devices)
    context: AbstractContextManager[Any] = tf.distribute.ReplicaContext(
        strategy, replica_id_in_sync_group=strategy.cluster_resolver.task_id * devices
    )
    return context


def bytes_of(variable: tf.Variable) -> int:
    """Return the bytes of a variable's value."""
    return int(variable.shape.num_elements() * variable.dtype.size)


def local_part(strategy: tf.distribute.Strategy, variable: Any) -> tf.Variable:
    """Return this rank's part of a Keras variable."""
    return strategy.experimental_local_results(variable.value)[0]
