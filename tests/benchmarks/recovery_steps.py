"""One distributed step of each framework, for the loop of recovery_loop.

Functions are made in functions, so that they travel by value: no worker has this module. What they
import is part of the recovery, as it is for a user.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

Step = Callable[[], object]
StepOf = Callable[[int], Step]
"""Builds a model on a rank; what it returns takes a step that needs all ranks."""


def torch_step() -> StepOf:
    """Forward and backward of a DDP model, with its all-reduce."""

    def build(rank: int) -> Step:
        import torch
        from torch.nn.parallel import DistributedDataParallel

        model = DistributedDataParallel(torch.nn.Linear(8, 1))
        return lambda: model(torch.ones(4, 8)).sum().backward()

    return build


def xgboost_step() -> StepOf:
    """A boosting round in the collective that is up already."""

    def build(rank: int) -> Step:
        import numpy as np
        import xgboost

        random = np.random.default_rng(rank)
        matrix = xgboost.DMatrix(random.random((1000, 8)), random.random(1000))
        booster = xgboost.Booster({"nthread": 1, "max_depth": 3}, [matrix])
        rounds = itertools.count()
        return lambda: booster.update(matrix, next(rounds))

    return build


def lightgbm_step(network: Callable[[], dict[str, Any]]) -> StepOf:
    """A boosting round.

    Args:
        network: parameters of the network, asked for in the training function.
    """

    def build(rank: int) -> Step:
        import lightgbm
        import numpy as np

        random = np.random.default_rng(rank)
        parameters = {"num_threads": 1, "num_leaves": 7, "verbosity": -1, **network()}
        rows = lightgbm.Dataset(random.random((1000, 8)), random.random(1000))
        return lightgbm.Booster(parameters, rows).update

    return build


def tensorflow_step(strategy: Callable[[], Any]) -> StepOf:
    """Forward and backward of a linear model, and the all-reduce of its gradient.

    Args:
        strategy: the `MultiWorkerMirroredStrategy`, asked for in the training function.
    """

    def build(rank: int) -> Step:
        import tensorflow as tf

        spread = strategy()
        with spread.scope():
            weights = tf.Variable(tf.zeros([8, 1]))

        def gradient() -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.ones([4, 8]) @ weights)
            mine = tape.gradient(loss, weights)
            return tf.distribute.get_replica_context().all_reduce("sum", mine)

        return tf.function(lambda: spread.run(gradient), autograph=False)

    return build
