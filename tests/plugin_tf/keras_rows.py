"""The rows of docs/keras.md that are TensorFlow's own. This module is sent to the workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import tensorflow as tf
from tests import keras_cases
from tests.keras_cases import (
    BATCH,
    CALLBACKS,
    DIFFERS,
    REFUSED,
    ROWS,
    Case,
    Part,
    X,
    Y,
    batches,
)


def rows() -> Any:
    return tf.data.Dataset.from_tensor_slices((X, Y))


def data(dataset: Any) -> Mapping[str, Any]:
    return {"x": dataset, "y": None, "batch_size": None}


def from_generator(part: Part) -> Any:
    signature = (tf.TensorSpec((None, 3), tf.float32), tf.TensorSpec((None, 1), tf.float32))
    return tf.data.Dataset.from_generator(lambda: iter(batches(part)), output_signature=signature)


ARGUMENTS = {
    **keras_cases.ARGUMENTS,
    # TensorFlow splits the batches that each worker makes, and these may differ.
    **{
        name: replace(keras_cases.ARGUMENTS[name], verdict=REFUSED)
        for name in ("`x`: `PyDataset`", "`x`: generator")
    },
    "`x`: `tf.data`": Case(fit=lambda part: data(rows().batch(BATCH))),
    "`x`: `tf.data` of unknown length": Case(
        fit=lambda part: data(rows().filter(lambda x, y: True).batch(BATCH))
    ),
    "`x`: `tf.data.Dataset.from_generator`": Case(fit=lambda part: data(from_generator(part))),
    "`x`: `tf.data` shuffled without a seed": Case(
        verdict=REFUSED, fit=lambda part: data(rows().shuffle(ROWS).batch(BATCH))
    ),
    "`batch_size` that the number of workers doesn't divide": Case(
        verdict=DIFFERS, fit=lambda part: {"batch_size": 5}
    ),
}

CASES = {**ARGUMENTS, **CALLBACKS}
