"""Ray Train's callback for Keras, with its name and arguments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import tensorflow as tf

import polytrain
from polytrain_tf.saved import Progress, reported, save

__all__ = ["ReportCheckpointCallback"]

_MOMENTS = tuple(
    f"{what}_{end}"
    for what in ("epoch", "train", "test", "predict", "train_batch", "test_batch", "predict_batch")
    for end in ("begin", "end")
)


class ReportCheckpointCallback(tf.keras.callbacks.Callback):
    """Reports Keras's logs, and saves the model, at the chosen hooks of a fit.

    It works with Keras 3 or, if `TF_USE_LEGACY_KERAS=1` is set as for Ray Train, with tf_keras.

    A checkpoint is Keras's own file, `model.keras`. A restarted training function loads it itself.
    `polytrain_tf.reporting.ReportCallback` resumes a fit exactly, with the state of other
    callbacks.
    """

    def __init__(
        self,
        checkpoint_on: str | Sequence[str] = "epoch_end",
        report_metrics_on: str | Sequence[str] = "epoch_end",
        metrics: str | Sequence[str] | Mapping[str, str] | None = None,
    ) -> None:
        """
        Args:
            checkpoint_on: hooks that save the model and report: Keras's names without `on_`.
            report_metrics_on: hooks that report only metrics.
            metrics: names of Keras's logs, or a dict of reported name to such a name; default: all.

        Raises:
            ValueError: Keras has no such hook.
        """
        super().__init__()
        self._metrics = metrics
        self._epoch = 0
        saves, reports = _listed(checkpoint_on), _listed(report_metrics_on)
        for moment in (*saves, *reports):
            if moment not in _MOMENTS:
                raise ValueError(f"{moment!r} is no moment of a fit: give one of {_MOMENTS}")
        for moment in {*saves, *reports}:
            setattr(self, f"on_{moment}", partial(self._report, moment, moment in saves))

    def _report(self, moment: str, saves: bool, *given: Any, **named: Any) -> None:
        # Hooks of epochs and batches get a number before the logs.
        logs = named.get("logs", given[-1] if given else None)
        if moment == "epoch_end":
            self._epoch = given[0] + 1
        metrics = self._chosen(logs if isinstance(logs, Mapping) else {})
        if not saves:
            polytrain.report(metrics)
            return
        with _metrics_kept(self.model), reported(metrics) as directory:
            save(self.model, directory, Progress(epochs=self._epoch))

    def _chosen(self, logs: Mapping[str, Any]) -> dict[str, Any]:
        if self._metrics is None:
            return dict(logs)
        names = self._metrics
        if not isinstance(names, Mapping):
            names = {name: name for name in _listed(names)}
        return {new: logs[name] for new, name in names.items()}


@contextmanager
def _metrics_kept(model: Any) -> Iterator[None]:
    """Keep the metrics of a model in a `with` block: saving resets them, also within an epoch."""
    variables = [
        # Those of tf_keras are TensorFlow's own.
        variable if isinstance(variable, tf.Variable) else variable.value
        for metric in model.metrics
        for variable in metric.variables
    ]
    parts = [
        model.distribute_strategy.experimental_local_results(variable)[0] for variable in variables
    ]
    values = [part.numpy() for part in parts]
    yield
    for part, value in zip(parts, values, strict=True):
        part.assign(value)


def _listed(given: str | Sequence[str]) -> list[str]:
    return [given] if isinstance(given, str) else list(given)
