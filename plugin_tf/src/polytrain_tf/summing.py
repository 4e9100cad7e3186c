"""Sums of numbers over all workers of a strategy."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf


@functools.lru_cache(maxsize=1)
def summing(strategy: tf.distribute.Strategy) -> Callable[[Sequence[int]], list[int]]:
    """A function that sums the numbers of all workers, which call it together."""

    # One graph for all calls.
    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def total(mine: tf.Tensor) -> Any:
        replicas = strategy.run(_summed_in_replicas, args=(mine,))
        return strategy.experimental_local_results(replicas)[0]

    def sums(values: Sequence[int]) -> list[int]:
        # Every device of a worker adds the worker's numbers.
        devices = len(strategy.extended.worker_devices)
        mine = tf.constant(list(values), dtype=tf.int64)
        return [int(number) // devices for number in total(mine).numpy()]

    return sums


def _summed_in_replicas(mine: tf.Tensor) -> tf.Tensor:
    # The replica's copy is on its device; the argument of a graph is on none.
    return tf.distribute.get_replica_context().all_reduce("sum", tf.identity(mine))
