"""Sums integers over all workers of a strategy."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf


@functools.lru_cache(maxsize=1)
def summing(strategy: tf.distribute.Strategy) -> Callable[[Sequence[int]], list[int]]:
    """Return a function that sums integers, element by element, over all workers.

    All workers call it together, with the same number of int64 values.
    """

    # The signature makes TensorFlow trace one graph for all calls.
    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def total(mine: tf.Tensor) -> Any:
        replicas = strategy.run(_summed_in_replicas, args=(mine,))
        return strategy.experimental_local_results(replicas)[0]

    def sums(values: Sequence[int]) -> list[int]:
        # Each device of a worker contributes the worker's numbers once.
        devices = len(strategy.extended.worker_devices)
        mine = tf.constant(list(values), dtype=tf.int64)
        return [int(number) // devices for number in total(mine).numpy()]

    return sums


def _summed_in_replicas(mine: tf.Tensor) -> tf.Tensor:
    # `identity` places a copy on the replica's device; a graph's argument has no device.
    return tf.distribute.get_replica_context().all_reduce("sum", tf.identity(mine))
