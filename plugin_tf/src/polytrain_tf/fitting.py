"""Declarative training: builds the user's model, and calls Keras's own `fit`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from polytrain_plugins import Shard
from polytrain_plugins.type_names import a_type
from polytrain_tf.backend import TensorFlow
from polytrain_tf.callback_state import load_callbacks
from polytrain_tf.data import TensorFlowShard, matrix_like
from polytrain_tf.epochs import EpochCallback
from polytrain_tf.saved import Progress, check_weights, load_into, progress_of

logger = logging.getLogger(__name__)

ReportProgress = Callable[[Progress, Mapping[str, Any]], None]
"""Called after every epoch, with the progress and the epoch's metrics."""


class Fitting:
    """Builds a model under a strategy, restores it from the checkpoint, if any, and fits it."""

    def __init__(
        self,
        options: TensorFlow,
        shards: Mapping[str, Shard],
        checkpoint: Path | None,
        strategy: tf.distribute.Strategy,
    ) -> None:
        self._options = options
        start = Progress() if checkpoint is None else progress_of(checkpoint)
        # All data sets have the same features, in the same order.
        features = _features(options, shards["train"].schema().names, start.features)
        self._data = {
            name: TensorFlowShard(shard, strategy).to_tf(
                feature_columns=features,
                as_matrix=True,
                label_columns=options.label or "",
                weight_column=options.weight,
                global_batch_size=options.batch_size,
            )
            for name, shard in shards.items()
        }
        self.start = replace(start, fit=1, features=tuple(features), ends_epoch=False)
        """The progress from which training goes on."""

        self._checkpoint = checkpoint
        callbacks = options.callbacks
        self.callbacks = _made(callbacks) if callable(callbacks) else list(callbacks)
        """The user's callbacks."""

        # Only a strategy of several workers has a resolver.
        self._is_rank_0 = not getattr(strategy.cluster_resolver, "task_id", 0)
        with strategy.scope():
            self.model = _compiled(options)
            # Only a step of its own uses layers that a call of the model doesn't build.
            self._has_own_step = type(self.model).train_step is not keras.Model.train_step
            if checkpoint is not None or self._has_own_step:
                _make_variables(self.model, matrix_like(shards["train"], features))
            self._made = len(self.model.weights)
            if checkpoint is not None:
                load_into(self.model, checkpoint)

    def fit(self, report: ReportProgress) -> None:
        """Train the remaining epochs. If there are none, callbacks only begin and end."""

        def checked(progress: Progress, metrics: Mapping[str, Any]) -> None:
            if self._has_own_step:
                check_weights(self.model, made=self._made, trained=len(self.model.weights))
            report(progress, metrics)

        companion = _Companion(self._checkpoint, self.start, checked)
        companion.warns = self._is_rank_0
        others = [data for name, data in self._data.items() if name != "train"]
        self.model.fit(
            self._data["train"],
            validation_data=others[0] if others else None,
            initial_epoch=self.start.epochs,
            epochs=self._options.epochs,
            # The shard's batches already have their order.
            shuffle=False,
            verbose=0,
            # `fit_watched` arranges the callbacks.
            callbacks=[*self.callbacks, companion],
        )


class _Companion(EpochCallback):
    """Restores the state of the other callbacks, and reports epochs."""

    def __init__(self, checkpoint: Path | None, start: Progress, report: ReportProgress) -> None:
        super().__init__()
        self.resumed = checkpoint
        self._start = start
        self._report = report
        self.warns = True
        """Whether to warn of a loss that is NaN, which no later epoch mends."""

    def resumed_progress(self, epochs: int) -> Progress | None:
        if self.resumed is None:
            return None
        # A run from another run's checkpoint may lack the callback that ended that run.
        return replace(self._start, is_over=self._start.is_over and bool(self.others))

    def on_train_begin(self, logs: Any = None) -> None:
        if self.resumed is not None:
            load_callbacks(self.others, self.resumed)

    def progress(self, epochs: int) -> Progress:
        return replace(self._start, epochs=epochs, is_over=self.model.stop_training)

    def report_epoch(self, epochs: int, metrics: Mapping[str, Any], *, is_last: bool) -> None:
        is_nan = any(np.isnan(metrics.get(name, 0.0)).any() for name in ("loss", "val_loss"))
        if is_nan and self.warns:
            self.warns = False
            logger.warning(
                "The loss is NaN after epoch %d. Look for missing or very large values in the "
                "features and labels, or lower the learning rate. "
                "FailureConfig(on_divergence='fail') ends such a run.",
                epochs,
            )
        self._report(self.progress(epochs), metrics)


def _features(
    options: TensorFlow, columns: Sequence[str], trained: Sequence[str] | None
) -> list[str]:
    """Return the features in the order of the checkpoint's model, if that is known."""
    others = (options.label, options.weight)
    found = list(options.features or [name for name in columns if name not in others])
    # The data's columns may have had another order then.
    if not options.features and trained is not None and set(found) == set(trained):
        return list(trained)
    return found


def _made(callbacks: Callable[[], Any]) -> list[Any]:
    made = callbacks()
    if not isinstance(made, list | tuple):
        raise TypeError(
            f"callbacks: the function returned {a_type(made)}, not a list. Return a list of "
            "callbacks."
        )
    return list(made)


def _compiled(options: TensorFlow) -> Any:
    assert options.model is not None
    model = options.model()
    if not isinstance(model, keras.Model):
        is_other = any(kind.__module__.startswith("tf_keras.") for kind in type(model).__mro__)
        remedy = "Use a training function for tf_keras models" if is_other else "Return the model"
        raise TypeError(
            f"model: the function returned {a_type(model)}, not a keras.Model. {remedy}."
        )
    arguments = options.compile
    if callable(arguments):
        arguments = arguments()
        if not isinstance(arguments, Mapping):
            raise TypeError(
                f"compile: the function returned {a_type(arguments)}, not a dict. Return the "
                "arguments of the model's compile."
            )
    if arguments:
        model.compile(**arguments)
    if not model.compiled:
        raise ValueError(
            "model: it isn't compiled. Pass compile={'optimizer': …, 'loss': …}, or have the "
            "function compile it."
        )
    return model


def _make_variables(model: Any, features: tf.TensorSpec) -> None:
    """Create the variables of layers, which may wait for a first batch."""
    model(np.zeros((1, *features.shape[1:]), dtype=features.dtype.as_numpy_dtype))
