"""Copies the state of a Keras fit after a batch, and continues within an epoch from such a copy.

Keras resets the metrics when it begins an epoch, and callbacks may change the learning rate then.
So a copy has the metrics beside the model, and a restart restores both after all callbacks have
begun the epoch. A copy isn't made after an epoch's last batch, but with the epoch's report.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from polytrain.extension import NotCleanError, Place, Survivor, survivor
from polytrain_tf import private
from polytrain_tf.callback_state import save_callbacks
from polytrain_tf.epochs import EpochCallback
from polytrain_tf.saved import Progress, load_into, save

_FILE = "in-epoch.npz"
"""File in a copy that was made within an epoch: the metrics of the epoch so far."""

_CONTINUE = (
    *("CSVLogger", "EarlyStopping", "History", "LearningRateScheduler", "ModelCheckpoint"),
    *("ProgbarLogger", "ReduceLROnPlateau", "RemoteMonitor", "SwapEMAWeights", "TensorBoard"),
    "TerminateOnNaN",
)
"""Keras's callbacks that keep nothing from batch to batch that changes the training."""

_WITHIN_EPOCHS = (
    *("on_epoch_begin", "on_batch_begin", "on_batch_end"),
    *("on_train_batch_begin", "on_train_batch_end"),
)


class KeptBatches(keras.callbacks.Callback):
    """Copies the state of one fit. It follows all other callbacks."""

    def __init__(self, one: EpochCallback, given: Mapping[str, Any]) -> None:
        """
        Args:
            one: the callback that reports the fit's epochs.
            given: the arguments of the fit, with a shard's batches.
        """
        super().__init__()
        one.before_report = self._before_report
        self._one = one
        self._data = given["x"]
        self._why_not = one.why_not_within_epochs() or unsuitable(given, one.others)
        self._survivor: Survivor = survivor()
        self._epoch = 0
        self._batches = 0
        self._has_begun = False
        self._size: int | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        if self._why_not is not None and self._survivor.copies is not None:
            self._survivor.copies.refuse(self._why_not)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if not self._has_begun:
            self._has_begun = True
            if self._one.resumed is not None and (self._one.resumed / _FILE).exists():
                _restore(self.model, self._one.resumed, self._data.element_spec)
        self._epoch = epoch
        self._batches = int(self._data.cardinality()) if self._why_not is None else 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch + 1 < self._batches and not self.model.stop_training:
            self._copy(self._survivor.place(), self._one.progress(self._epoch), within=True)

    def _before_report(self, metrics: Mapping[str, Any], epochs: int) -> None:
        if self._why_not is None:
            # A restart continues after the report.
            place = self._survivor.place().after_report(metrics)
            self._copy(place, self._one.progress(epochs), within=False)

    def _copy(self, place: Place, progress: Progress, *, within: bool) -> None:
        if self._survivor.copies is not None:
            if self._size is None:
                self._size = _size(self.model)
            write = partial(self._write, place, progress, within)
            self._survivor.copies.step(write, size=self._size)

    def _write(self, place: Place, progress: Progress, within: bool, directory: Path) -> Place:
        metrics = [np.array(each) for each in self.model.metrics_variables]
        if not all(np.isfinite(each).all() for each in metrics):
            raise NotCleanError("a metric isn't a finite number")
        try:
            save(self.model, directory, progress)
        finally:
            # Saving resets them.
            for variable, value in zip(self.model.metrics_variables, metrics, strict=True):
                variable.assign(value)
        save_callbacks(self._one.others, directory)
        if within:
            np.savez(directory / _FILE, *metrics)
        return place


def unsuitable(given: Mapping[str, Any], callbacks: Sequence[Any]) -> str | None:
    """Return why a restart couldn't continue a fit within an epoch; None if it could.

    Args:
        given: the arguments of the fit.
        callbacks: the user's callbacks.
    """
    model = given["self"]
    if given["steps_per_epoch"] is not None:
        return "steps_per_epoch would begin anew within an epoch: leave it out"
    if tf.config.list_logical_devices("GPU"):
        return "its variables are on a device"
    if model.run_eagerly:
        return "run_eagerly=True: code that runs in each step may keep a state of its own"
    if model.steps_per_execution > 1:
        return f"steps_per_execution={model.steps_per_execution} takes several steps at once"
    for each in callbacks:
        if may_keep_within_epochs(each):
            return (
                f"the callback {type(each).__name__} may keep something from batch to batch that a "
                "restart within an epoch would lose: let it act at the end of epochs only"
            )
    return None


def may_keep_within_epochs(callback: Any) -> bool:
    """Return whether a callback may have a state that begins with an epoch."""
    kept = tuple(getattr(keras.callbacks, name) for name in _CONTINUE)
    if type(callback) in kept:
        return False
    known = next(
        (kind for kind in type(callback).__mro__ if kind in kept), keras.callbacks.Callback
    )
    return isinstance(callback, keras.callbacks.BackupAndRestore) or any(
        getattr(getattr(callback, hook), "__func__", None) is not getattr(known, hook)
        for hook in _WITHIN_EPOCHS
    )


def _restore(model: Any, directory: Path, batches: Any) -> None:
    """Restore the model and the epoch's metrics, whatever has changed since the fit began.

    Args:
        model: the model.
        directory: the copy's.
        batches: the `tf.TensorSpec` of each part of a batch.
    """
    with model.distribute_strategy.scope():
        if not private.is_built(model):
            # Keras makes the metrics' variables in the first step.
            private.build_from(model, batches)
        load_into(model, directory)
        with np.load(directory / _FILE) as saved:
            values = [saved[name] for name in saved.files]
            for variable, value in zip(model.metrics_variables, values, strict=True):
                variable.assign(value)


def _size(model: Any) -> int:
    """Return the bytes of the whole state."""
    variables = [*model.variables, *model.optimizer.variables]
    return sum(each.shape.num_elements() * each.dtype.size for each in _values(variables))


def _values(variables: Sequence[Any]) -> list[tf.Variable]:
    return [each.value for each in variables]
