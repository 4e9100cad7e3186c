"""Keeps the state of a Keras fit after its batches, and continues a fit within an epoch.

A single worker copies its state; of several workers, each keeps it in memory (`kept_for_peers`).
Keras resets the metrics when it begins an epoch, and callbacks may change the learning rate then.
So the metrics are saved beside the model, and a restart restores both after all callbacks have
begun the epoch. After an epoch's last batch several workers keep it too: a restart then begins the
epoch without a batch, and ends it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import polytrain
from polytrain.extension import NotCleanError, Place, Survivor, survivor
from polytrain_tf import private
from polytrain_tf.agreeing import WITHIN_EPOCHS, on_any_worker, overrides
from polytrain_tf.callback_state import states_of, write_states
from polytrain_tf.epochs import EpochCallback
from polytrain_tf.kept_for_peers import FitPoint, KeptForPeers, own_variables, read_own, write_own
from polytrain_tf.local_variables import bytes_of, local_part
from polytrain_tf.saved import load_into, progress_of, save, variables_of

_FILE = "in-epoch.npz"
"""File with what a checkpoint within an epoch has beside the model, such as the metrics so far."""

_CONTINUE = (
    *("CSVLogger", "EarlyStopping", "History", "LearningRateScheduler", "ModelCheckpoint"),
    *("ProgbarLogger", "ReduceLROnPlateau", "RemoteMonitor", "SwapEMAWeights", "TensorBoard"),
    "TerminateOnNaN",
)
"""Keras's callbacks that keep nothing from batch to batch that changes the training."""


class KeptBatches(keras.callbacks.Callback):
    """Keeps the state of one fit. It follows all other callbacks."""

    def __init__(
        self,
        one: EpochCallback,
        given: Mapping[str, Any],
        *,
        used: Callable[[int], None],
        trained: Callable[[], None],
    ) -> None:
        """
        Args:
            one: the callback that reports the fit's epochs.
            given: the fit's arguments, with a shard's batches.
            used: counts an epoch's batches up to this one as used.
            trained: notes that workers have trained since they averaged their statistics.
        """
        super().__init__()
        one.before_report = self._before_report
        self._one = one
        self._model, self._data = given["self"], given["x"]
        self._why_not = one.why_not_within_epochs() or unsuitable(given, one.others)
        self._counts_batches = counts_batches(one)
        strategy = self._model.distribute_strategy
        if strategy.num_replicas_in_sync > 1:
            # Workers may have callbacks of their own, and keep their states together.
            is_unsuitable, self._counts_batches = on_any_worker(
                strategy, self._why_not is not None, self._counts_batches
            )
            if is_unsuitable and self._why_not is None:
                self._why_not = "another rank's callbacks don't allow to continue within an epoch"
        self._survivor: Survivor = survivor()
        self._used, self._trained = used, trained
        self._epoch = 0
        self._batch = 0
        self._batches = 0
        self._has_begun = False
        self._size: int | None = None
        self._peers: KeptForPeers | None = None
        self._has_own_logs = has_own_logs(self._model)
        self._is_in_graph = False
        """Whether the graph of a step keeps the state."""

    def on_train_begin(self, logs: Any = None) -> None:
        if self._why_not is not None:
            self._survivor.keep_nothing(self._why_not)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._wait_if_held()
        if not self._has_begun:
            self._has_begun = True
            if self._one.resumed is not None and (self._one.resumed / _FILE).exists():
                _restore(self.model, self._one.resumed, self._data.element_spec)
                if progress_of(self._one.resumed).ends_epoch:
                    self._data.polytrain_ends_epoch = True
                    private.take_logs_of_metrics(self.model)
                    self._trained()
        self._epoch = epoch
        self._batches = int(self._data.cardinality()) if self._why_not is None else 0

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """In a `with` block around the fit, have the model's steps keep the state themselves."""
        keeps = self._has_peers and self._why_not is None
        if not keeps or self._model.jit_compile or self._counts_batches:
            yield
            return

        def keeping_step(own: Callable[[Any], Any]) -> Callable[[Any], Any]:
            def step(data: Any) -> Any:
                outputs = own(data)
                self._is_in_graph = True
                return self._for_peers.with_state_kept(outputs, self._point_in_step)

            return step

        with step_replaced(self._model, keeping_step):
            yield

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._wait_if_held()
        self._batch = batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._wait_if_held()
        if batch + 1 < self._batches and not self.model.stop_training:
            point = partial(self._point, self._epoch)
            if self._has_peers:
                self._for_peers.after_batch(point, is_kept=self._is_in_graph)
            self._copy(point)

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._wait_if_held()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._wait_if_held()

    def _wait_if_held(self) -> None:
        if self._peers is not None:
            self._peers.wait_if_held()

    def _before_report(self, metrics: Mapping[str, Any], epochs: int) -> None:
        if self._why_not is None:
            # A restart continues after the report.
            point = self._point(epochs, reported=metrics)
            if self._has_peers:
                self._for_peers.keep(point)
            self._copy(lambda: point)

    @property
    def _for_peers(self) -> KeptForPeers:
        if self._peers is None:
            # Now that the optimizer has its variables.
            self._peers = KeptForPeers(self._model, self._survivor, _FILE)
        return self._peers

    @property
    def _has_peers(self) -> bool:
        strategy = self._model.distribute_strategy
        return self._survivor.can_keep and strategy.num_replicas_in_sync > 1

    def _point_in_step(self) -> FitPoint | None:
        """Return where the fit is at the end of a step; None if it can't continue there."""
        ends_epoch = self._batch + 1 == self._batches
        if ends_epoch and self._has_own_logs:
            # A restart couldn't know its logs.
            return None
        self._used(self._batch)
        point = self._point(self._epoch)
        return replace(point, progress=replace(point.progress, ends_epoch=ends_epoch))

    def _point(self, epochs: int, reported: Mapping[str, Any] | None = None) -> FitPoint:
        place = self._survivor.place()
        return FitPoint(
            place=place if reported is None else place.after_report(reported),
            progress=self._one.progress(epochs),
            callbacks=states_of(self._one.others),
            is_within=reported is None,
        )

    def _copy(self, point: Callable[[], FitPoint]) -> None:
        """Note a step; only a worker without peers copies its state."""
        if self._survivor.copies is not None:
            if self._size is None:
                self._size = _size(self.model)
            self._survivor.copies.step(partial(self._write, point), size=self._size)

    def _write(self, point_now: Callable[[], FitPoint], directory: Path) -> Place:
        point = point_now()
        variables = own_variables(self.model)
        own = [np.array(each) for each in variables]
        if not all(np.isfinite(each).all() for each in own):
            raise NotCleanError("a metric or another variable isn't a finite number")
        try:
            save(self.model, directory, point.progress)
        finally:
            # Saving resets metrics.
            for variable, value in zip(variables, own, strict=True):
                variable.assign(value)
        write_states(point.callbacks, directory)
        if point.is_within:
            write_own(directory / _FILE, {0: own})
        return point.place


@contextmanager
def step_replaced(model: Any, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replace a model's `train_step` in a `with` block. `make` gets it, and returns another.

    Keras makes a graph of the first step, and uses it in all later fits.
    """
    users = vars(model).get("train_step")
    model.train_step = make(model.train_step)
    model.train_function = None
    try:
        yield
    finally:
        del model.train_step
        if users is not None:
            model.train_step = users
        model.train_function = None


def has_own_logs(model: Any) -> bool:
    """Return whether a model's steps may have logs that its metrics don't have."""
    return overrides(model, ("train_step", "compute_metrics"), base=keras.Model)


def unsuitable(given: Mapping[str, Any], callbacks: Sequence[Any]) -> str | None:
    """Return why a restart couldn't continue a fit, with these arguments, within an epoch.

    It is None if it could.
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


def counts_batches(one: EpochCallback) -> bool:
    """Return whether a callback of Keras's has a count that each batch changes."""
    return any(
        isinstance(each, keras.callbacks.ModelCheckpoint) and each.save_freq != "epoch"
        for each in one.others
    )


def may_keep_within_epochs(callback: Any) -> bool:
    """Return whether a callback may have a state that begins with an epoch."""
    kept = tuple(getattr(keras.callbacks, name) for name in _CONTINUE)
    if type(callback) in kept:
        return False
    known = next(
        (kind for kind in type(callback).__mro__ if kind in kept), keras.callbacks.Callback
    )
    return overrides(callback, WITHIN_EPOCHS, base=known)


def _restore(model: Any, directory: Path, batches: Any) -> None:
    """Restore the model and the epoch's metrics, whatever has changed since the fit began.

    `batches` has the `tf.TensorSpec` of each part of a batch.
    """
    with model.distribute_strategy.scope():
        if not private.is_built(model):
            # Keras makes the metrics' variables in the first step.
            private.build_from(model, batches)
        load_into(model, directory)
        context, variables = polytrain.get_context(), own_variables(model)
        rank, ranks = context.get_world_rank(), context.get_world_size()
        own = read_own(directory / _FILE, rank, ranks, variables)
        for variable, value in zip(variables, own, strict=True):
            local_part(model.distribute_strategy, variable).assign(value)


def _size(model: Any) -> int:
    """Return the bytes of the whole state."""
    return sum(bytes_of(each.value) for each in variables_of(model))
