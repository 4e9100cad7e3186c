"""Keras models and layers in users' functions and configs: known by layers and weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

from polytrain.functions.code_fingerprint import code_fingerprint


def dense(units: int = 2, *, bias: float = 0.0, activation: str | None = None) -> Any:
    layer = keras.layers.Dense(
        units,
        kernel_initializer="ones",
        bias_initializer=keras.initializers.Constant(bias),
        activation=activation,
        name="dense",
    )
    layer.build((None, 3))
    return layer


def model(layer: Any, *, epochs: int = 0) -> Any:
    made = keras.Sequential([keras.Input((3,), name="x"), layer], name="model")
    made.compile(optimizer="sgd", loss="mse")
    made.fit(np.ones((4, 3)), np.zeros((4, 2)), epochs=epochs, verbose=0)
    return made


CASES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "a layer with other weights": (dense, lambda: dense(bias=1.0)),
    "a layer with other options": (dense, lambda: dense(activation="relu")),
    "a layer of another size": (dense, lambda: dense(3)),
    "a model that was trained": (lambda: model(dense()), lambda: model(dense(), epochs=1)),
    "a model with another layer": (
        lambda: model(dense()),
        lambda: model(dense(activation="relu")),
    ),
}


@pytest.mark.parametrize(("make", "make_other"), CASES.values(), ids=CASES)
def test_a_model_counts_by_its_layers_and_weights(
    make: Callable[[], Any], make_other: Callable[[], Any]
) -> None:
    assert code_fingerprint(make()) == code_fingerprint(make())
    assert code_fingerprint(make()) != code_fingerprint(make_other())


def test_a_function_counts_with_the_model_that_it_holds() -> None:
    def of(held: Any) -> Callable[[], Any]:
        return lambda: held

    assert code_fingerprint(of(model(dense()))) == code_fingerprint(of(model(dense())))
    assert code_fingerprint(of(model(dense()))) != code_fingerprint(of(model(dense(bias=1.0))))
