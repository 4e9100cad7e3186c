"""Lets the workers of a Keras fit stop together, and average their moving statistics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import keras
import tensorflow as tf

from polytrain.extension import nested_layers
from polytrain_tf.summing import summing

WITHIN_EPOCHS = (
    *("on_epoch_begin", "on_batch_begin", "on_batch_end"),
    *("on_train_batch_begin", "on_train_batch_end"),
)
"""The hooks that are called before the end of an epoch."""


class StopsTogether(keras.callbacks.Callback):
    """Ends training on all workers if a callback ends it on one: otherwise the others would wait.

    It follows all of the user's callbacks. Keras's own decide by metrics, which are the same on all
    workers, so workers agree after every batch only if there are callbacks of other classes.
    """

    def __init__(self, strategy: tf.distribute.Strategy, callbacks: Sequence[Any]) -> None:
        super().__init__()
        self._strategy = strategy
        self._within_epochs = any(map(_may_stop_within_epochs, callbacks))

    def on_train_begin(self, logs: Any = None) -> None:
        # A worker may have callbacks of its own.
        [self._within_epochs] = on_any_worker(self._strategy, self._within_epochs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._within_epochs:
            self._agree()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._agree()

    def _agree(self) -> None:
        [self.model.stop_training] = on_any_worker(self._strategy, self.model.stop_training)


def on_any_worker(strategy: tf.distribute.Strategy, *conditions: bool) -> list[bool]:
    """Return whether each condition holds on any worker. All workers call this together."""
    return [count > 0 for count in summing(strategy)([*map(int, conditions)])]


class AverageStatistics(keras.callbacks.Callback):
    """Averages BatchNormalization's moving statistics before the model is evaluated or saved.

    It precedes all of the user's callbacks. Each worker's statistics come from its own rows, and a
    checkpoint would hold those of rank 0.
    """

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        super().__init__()
        self._strategy = strategy
        self._average: Any = None
        self._has_trained = False

    def trained(self) -> None:
        """Note that the statistics may differ between workers."""
        self._has_trained = True

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.trained()

    def on_test_begin(self, logs: Any = None) -> None:
        self._average_statistics()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._average_statistics()

    def _average_statistics(self) -> None:
        if not self._has_trained:
            return
        self._has_trained = False
        if self._average is None:
            self._average = _averaging_of(self.model, self._strategy)
        self._average()


_averages: WeakKeyDictionary[Any, tuple[list[int], Callable[[], None]]] = WeakKeyDictionary()
"""Model → ids of its averaged variables, and the averaging function, whose graph is traced once."""


def _averaging_of(model: Any, strategy: tf.distribute.Strategy) -> Callable[[], None]:
    variables = _statistics(model)
    if not variables:
        return lambda: None
    ids = [id(variable) for variable in variables]
    known = _averages.get(model)
    if known is None or known[0] != ids:
        known = _averages[model] = (ids, _averaging(strategy, variables))
    return known[1]


def _averaging(strategy: tf.distribute.Strategy, variables: Sequence[Any]) -> Callable[[], None]:
    """Return a function that averages variables over all workers, which call it together."""

    def in_replica() -> None:
        context = tf.distribute.get_replica_context()
        means = context.all_reduce("mean", [tf.identity(each.value) for each in variables])
        for variable, mean in zip(variables, means, strict=True):
            variable.value.assign(mean)

    @tf.function
    def average() -> None:
        strategy.run(in_replica)

    return average


def _may_stop_within_epochs(callback: Any) -> bool:
    is_users = type(callback).__module__.partition(".")[0] not in ("keras", "polytrain_tf")
    if not is_users and not isinstance(callback, keras.callbacks.LambdaCallback):
        return False
    return overrides(callback, ("on_train_begin", *WITHIN_EPOCHS))


def overrides(
    one: Any, hooks: Sequence[str], *, base: type[Any] = keras.callbacks.Callback
) -> bool:
    """Return whether a callback, or a model, overrides one of these hooks of a base class."""
    return any(
        getattr(getattr(one, hook), "__func__", None) is not getattr(base, hook) for hook in hooks
    )


def _statistics(model: Any) -> list[Any]:
    """Return the moving statistics that differ between workers."""
    return [
        variable
        for layer in nested_layers(model)
        if isinstance(layer, keras.layers.BatchNormalization)
        # A frozen layer doesn't update its statistics; a synchronized one already shares them.
        if layer.trainable and not layer.synchronized
        for variable in (layer.moving_mean, layer.moving_variance)
    ]
