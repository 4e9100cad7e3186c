"""Predictions by Keras models of any kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pyarrow as pa

from polytrain_tf.predicting import KerasPredictor
from polytrain_tf.saved import Progress, save

X = np.arange(6, dtype="float32").reshape(3, 2)
TABLE = pa.table({"x0": X[:, 0], "x1": X[:, 1]})


@keras.saving.register_keras_serializable()
class Two(keras.Model):  # type: ignore[misc]  # keras has no types
    """A subclass, whose inputs and outputs have no names."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.sums = keras.layers.Dense(1, kernel_initializer="ones")

    def call(self, x: Any) -> Any:
        return [self.sums(x), x]


def own_loss(y: Any, predicted: Any) -> Any:
    """Not registered with Keras."""
    return keras.ops.square(predicted - y)


def test_a_model_of_a_class_of_its_own_predicts(tmp_path: Path) -> None:
    model = Two()
    model(X)
    save(model, tmp_path, Progress())
    predicted: Any = KerasPredictor(tmp_path)(TABLE)
    assert list(predicted) == ["output_0", "output_1"]
    np.testing.assert_array_equal(predicted["output_0"], X.sum(axis=1, keepdims=True))
    np.testing.assert_array_equal(predicted["output_1"], X)


def test_a_prediction_needs_no_loss(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile(optimizer="adam", loss=own_loss)
    save(model, tmp_path, Progress())
    predicted: Any = KerasPredictor(tmp_path)(TABLE)
    np.testing.assert_array_equal(predicted, X.sum(axis=1, keepdims=True))
