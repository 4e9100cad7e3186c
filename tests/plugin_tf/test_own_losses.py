"""Which models get a warning that their gradients may be added up."""

from __future__ import annotations

import logging
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from polytrain_tf.own_losses import OwnLossWarning


def mean_error(x: Any, y: Any, y_pred: Any, weight: Any, *, training: bool) -> Any:
    return tf.reduce_mean((y - y_pred) ** 2)


@pytest.mark.parametrize(
    ("own", "warns"),
    [
        ({}, False),
        ({"train_step": lambda data: {"loss": tf.reduce_mean(data[0])}}, True),
        ({"compute_loss": mean_error}, True),
    ],
)
def test_a_function_that_is_set_on_the_model_is_its_own(
    own: dict[str, Any], warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(optimizer="sgd", loss="mse")
    for name, function in own.items():
        setattr(model, name, function)
    warning = OwnLossWarning(model)
    x = np.ones((2, 1), "float32")
    with warning.looking(), caplog.at_level(logging.WARNING):
        model.fit(x, x, verbose=0, callbacks=[warning])
    assert ("gradients of a loss that train_step" in caplog.text) is warns
