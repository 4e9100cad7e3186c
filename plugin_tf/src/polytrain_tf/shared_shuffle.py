"""Gives data that TensorFlow splits the same order on all workers.

Every worker makes the same batches of all rows, and TensorFlow gives it a part of each. If each
worker shuffled in its own order, some rows would be used twice, and others not at all.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from types import GeneratorType
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from polytrain_plugins.type_names import a_type
from polytrain_tf.numpy_batches import steps
from polytrain_tf.private import NEXT_ITERATOR, SHUFFLE_ARRAYS, shuffles_without_seed
from polytrain_tf.summing import summing


@contextlib.contextmanager
def shuffled_alike(strategy: tf.distribute.Strategy, rank: int) -> Iterator[None]:
    """In a `with` block, let `fit` shuffle arrays in the same order on all workers.

    All workers enter it together. Rank 0's `keras.utils.set_random_seed` decides the order. Without
    a seed, each call has a different order.
    """
    seed = [*summing(strategy)([_own_seed() if rank == 0 else 0]), 0]
    own_shuffle = tf.random.shuffle

    def shuffle(value: Any, *args: Any, **kwargs: Any) -> Any:
        now = tf.numpy_function(lambda: np.array(seed, np.int64), [], tf.int64)
        return tf.random.experimental.stateless_shuffle(value, tf.ensure_shape(now, [2]))

    def shuffling(own_dataset: Any) -> Any:
        def get_tf_dataset(self: Any) -> Any:
            tf.random.shuffle = shuffle
            try:
                return own_dataset(self)
            finally:
                tf.random.shuffle = own_shuffle

        return get_tf_dataset

    def counting(own_iterator: Any) -> Any:
        def get_iterator(self: Any) -> Any:
            # Count here: all workers make the same iterators, but threads decide when they read.
            seed[1] += 1
            return own_iterator(self)

        return get_iterator

    with SHUFFLE_ARRAYS.replaced(shuffling), NEXT_ITERATOR.replaced(counting):
        yield


def check_order(name: str, data: Any) -> None:
    """Raise an error if the workers might make different batches from an argument of `fit`.

    Raises:
        ValueError: it is a generator or a `PyDataset`, or a `tf.data.Dataset` that shuffles without
            a seed.
    """
    if isinstance(data, GeneratorType | keras.utils.PyDataset):
        # A generator's first batches would also be lost: Keras reads them to build the model.
        raise ValueError(
            f"{name}: several workers can't share {a_type(data)}. TensorFlow gives each "
            "worker a part of every batch, so all must make the same batches; but each process "
            "runs it with random numbers of its own, with which Keras also shuffles a PyDataset, "
            "so rows would come twice or never. Pass arrays, a tf.data.Dataset that gives the same "
            "batches on all workers (tf.data.Dataset.from_generator(…)), or each worker's rows: "
            "shard.to_tf(…)."
        )
    if not isinstance(data, tf.data.Dataset):
        return
    policy = data.options().experimental_distribute.auto_shard_policy
    kinds = tf.data.experimental.AutoShardPolicy
    made_by = list(steps(data))
    # TensorFlow splits files among workers before it shuffles rows.
    of_files = policy == kinds.FILE or any(
        kind in type(step).__name__ for step in made_by for kind in ("Line", "Record")
    )
    if policy == kinds.OFF or (policy != kinds.DATA and of_files):
        return
    if any(map(shuffles_without_seed, made_by)):
        raise ValueError(
            f"{name}: this tf.data.Dataset shuffles without a seed, so every worker has an order "
            "of its own; but TensorFlow gives each a part of every batch, so rows would come twice "
            "or never. Give all workers one seed: dataset.shuffle(…, seed=1), or call "
            "keras.utils.set_random_seed(1) before."
        )


def _own_seed() -> int:
    """Return TensorFlow's next seed; a random one if the training function hasn't set a seed."""
    set_seed, operation = tf.compat.v1.get_seed(None)
    if set_seed is None:
        return random.SystemRandom().randrange(1 << 31)
    return hash((int(set_seed), int(operation))) % (1 << 31)
