"""Keras's `fit` in a training function: what it must not be given, and what it has trained on."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from polytrain_tf.data import TensorFlowShard
from polytrain_tf.epochs import EpochCallback
from polytrain_tf.rank_files import written_by_rank_0

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def fit_watched(
    strategy: tf.distribute.Strategy,
    *,
    rank: int,
    has_shards: Callable[[], bool],
    unfit: RuntimeError | None,
) -> Iterator[None]:
    """While `model.fit` refuses what workers can't train together, and tells what it has used.

    From before a training function begins: in `model.fit(shard.to_tf(…))` Python looks up `fit`
    first.

    Args:
        strategy: of the workers. One alone may fit whatever it likes.
        rank: of this worker.
        has_shards: whether the training function has asked for a shard.
        unfit: why this Keras can't fit anything on several workers; None if it can.
    """
    is_alone = strategy.num_replicas_in_sync == 1
    own_fit = keras.Model.fit
    signature = inspect.signature(own_fit)

    @functools.wraps(own_fit)
    def fit(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        shard = getattr(given["x"], "polytrain_shard", None)
        if not is_alone:
            if unfit is not None:
                raise unfit
            _refuse_outsider(given["self"], strategy)
            _refuse_loss_scaling(given["self"])
            if has_shards() and any(map(_is_split, (given["x"], given["validation_data"]))):
                _tell_of_splitting()
            if shard is not None and given["class_weight"] is not None:
                raise ValueError(
                    "class_weight: TensorFlow can't apply it to data of several workers. Give each "
                    "row its weight, in a column: shard.to_tf(…, weight_column='w')."
                )
        with contextlib.ExitStack() as stack:
            if not isinstance(given["callbacks"], keras.callbacks.CallbackList):
                _arrange(given)
                given["callbacks"] = stack.enter_context(
                    written_by_rank_0(given["callbacks"], is_alone=is_alone, rank=rank)
                )
                if shard is not None:
                    stack.enter_context(shard.telling())
                    given["callbacks"] = [_Used(shard), *given["callbacks"]]
            return own_fit(*bound.args, **bound.kwargs)

    keras.Model.fit = fit
    try:
        yield
    finally:
        keras.Model.fit = own_fit


def _arrange(given: dict[str, Any]) -> None:
    """Have the callbacks that tell of epochs arrange a fit's arguments."""
    callbacks = given["callbacks"]
    # Keras takes one alone as well, and lists of lists.
    given["callbacks"] = [] if callbacks is None else keras.tree.flatten(callbacks)
    for each in given["callbacks"]:
        if isinstance(each, EpochCallback):
            each.arrange(given)


class _Used(keras.callbacks.Callback):  # type: ignore[misc]  # keras has no types
    """Tells a shard what a fit has used of it, before any callback of the user's."""

    def __init__(self, shard: TensorFlowShard) -> None:
        super().__init__()
        self._shard = shard
        self._seen = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._seen = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._shard.used(batch + 1 - self._seen)
        self._seen = batch + 1


def _refuse_outsider(model: Any, strategy: tf.distribute.Strategy) -> None:
    """Raise unless all workers train this model together.

    Raises:
        ValueError: it was built outside the strategy's scope.
    """
    if model.distribute_strategy is not strategy:
        raise ValueError(
            "The model was built outside the run's strategy: every worker would train one of "
            "its own. Build and compile it in `with polytrain_tf.strategy().scope():`."
        )


def _refuse_loss_scaling(model: Any) -> None:
    """Raise if workers could disagree about whether there is a step.

    Raises:
        ValueError: the model's optimizer leaves steps out whose gradients are infinite.
    """
    if isinstance(getattr(model, "optimizer", None), keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            "mixed_float16: its LossScaleOptimizer leaves out a step if a worker's own gradients "
            "overflow, and the others wait for it for ever. Use the policy 'mixed_bfloat16', which "
            "scales no loss."
        )


def _is_split(data: Any) -> bool:
    return data is not None and not hasattr(data, "polytrain_shard")


@functools.cache
def _tell_of_splitting() -> None:
    logger.warning(
        "model.fit was given data that TensorFlow splits over the workers. That is right for what "
        "every worker has as a whole; a worker's shard is split already, and only a part of it is "
        "trained on. Pass shard.to_tf(…)."
    )
