"""Predictions by a Keras model, which a checkpoint holds whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from polytrain.extension import to_format
from polytrain_plugins import Predictions
from polytrain_tf.backend import TensorFlow
from polytrain_tf.data import columns_of, matrix_of
from polytrain_tf.saved import has_progress, load, progress_of


def feature_columns(
    backend: TensorFlow, directory: Path, columns: Sequence[str], options: Mapping[str, Any]
) -> Sequence[str] | None:
    """The columns that a model gets; None if `collate_fn` chooses.

    Args:
        backend: the run's.
        directory: the checkpoint.
        columns: those of the data.
        options: those of `Result.predict`.
    """
    if options.get("collate_fn") is not None:
        return None
    features = options.get("features") or backend.features
    if features is None and has_progress(directory):
        features = progress_of(directory).features
    if features is None:
        features = [name for name in columns if name not in (backend.label, backend.weight)]
    return [features] if isinstance(features, str) else list(features)


class KerasPredictor:
    """A model, and how rows become its input."""

    def __init__(
        self,
        directory: Path,
        *,
        features: str | Sequence[str] | None = None,
        collate_fn: Callable[[dict[str, Any]], Any] | None = None,
        custom_objects: Mapping[str, Any] | None = None,
    ) -> None:
        """See `prediction_options` for the options.

        Args:
            directory: the checkpoint.
        """
        self._model = load(directory, custom_objects)
        self._features = features
        self._collate = collate_fn

    def __call__(self, table: pa.Table) -> Predictions:
        """The model's predictions for some rows, of the columns that it gets."""
        batch = to_format(table, "numpy")
        rows = self._input(batch) if self._collate is None else self._collate(batch)
        output = self._model.predict_on_batch(rows)
        if isinstance(output, list | tuple):
            output = dict(zip(self._model.output_names, output, strict=True))
        if isinstance(output, Mapping):
            return {str(name): np.asarray(value) for name, value in output.items()}
        return np.asarray(output)

    def _input(self, batch: dict[str, Any]) -> Any:
        """A column, a matrix of several, or, for a model with several inputs, each by its name."""
        if isinstance(self._features, str) or len(self._model.inputs or ()) > 1:
            columns = self._features if isinstance(self._features, str) else list(batch)
            return columns_of(batch, columns, None, keeps_integers=True)
        return matrix_of(batch, list(batch))
