"""Predicts by a Keras model from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from polytrain import CheckpointError
from polytrain.extension import to_format
from polytrain_plugins import Predictions
from polytrain_tf.backend import TensorFlow
from polytrain_tf.data import columns_of, matrix_of
from polytrain_tf.saved import has_progress, load, progress_of


def feature_columns(
    backend: TensorFlow, directory: Path, columns: Sequence[str], options: Mapping[str, Any]
) -> Sequence[str] | None:
    """Return the columns that a model needs; None if `collate_fn` chooses them."""
    if options.get("collate_fn") is not None:
        return None
    features = options.get("features") or backend.features
    if features is None and has_progress(directory):
        features = progress_of(directory).features
    if features is None:
        features = [name for name in columns if name not in (backend.label, backend.weight)]
    return [features] if isinstance(features, str) else list(features)


class KerasPredictor:
    """Converts rows to a model's input, and predicts."""

    def __init__(
        self,
        directory: Path,
        *,
        features: str | Sequence[str] | None = None,
        collate_fn: Callable[[dict[str, Any]], Any] | None = None,
        custom_objects: Mapping[str, Any] | None = None,
    ) -> None:
        """See `prediction_problems` for the options."""
        try:
            self._model = load(directory, custom_objects)
        except CheckpointError:
            # Only training needs the loss and the optimizer, whose code may not be here.
            self._model = load(directory, custom_objects, is_compiled=False)
        self._features = features
        self._collate = collate_fn

    def __call__(self, table: pa.Table) -> Predictions:
        """Return the predictions for these rows: an array, or a dict by name of output."""
        batch = to_format(table, "numpy")
        rows = self._input(batch) if self._collate is None else self._collate(batch)
        output = self._model.predict_on_batch(rows)
        if isinstance(output, list | tuple):
            numbered = [f"output_{number}" for number in range(len(output))]
            names = getattr(self._model, "output_names", numbered)
            output = dict(zip(names, output, strict=True))
        if isinstance(output, Mapping):
            return {str(name): np.asarray(value) for name, value in output.items()}
        return np.asarray(output)

    def _input(self, batch: dict[str, Any]) -> Any:
        """Return one column, a matrix of columns, or a dict if the model has several inputs."""
        # A subclass of keras.Model has no names for its inputs and outputs.
        inputs = getattr(self._model, "inputs", None) or ()
        if isinstance(self._features, str) or len(inputs) > 1:
            columns = self._features if isinstance(self._features, str) else list(batch)
            return columns_of(batch, columns, None, keeps_integers=True)
        return matrix_of(batch, list(batch))
