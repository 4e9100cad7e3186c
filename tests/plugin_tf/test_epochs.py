"""Epochs as they are told, whatever their metrics are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from polytrain.workers.metrics import plain_metrics
from polytrain_tf.epochs import EpochCallback


class Tells(EpochCallback):
    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[int, Mapping[str, Any], bool]] = []

    def tell(self, epochs: int, metrics: Mapping[str, Any], *, is_last: bool) -> None:
        self.told.append((epochs, metrics, is_last))


def test_metrics_of_several_numbers_are_lists() -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, activation="softmax")])
    model.compile(loss="categorical_crossentropy", metrics=[keras.metrics.F1Score()])
    tells = Tells()
    model.fit(np.ones((4, 2)), np.eye(3)[[0, 1, 2, 0]], verbose=0, callbacks=[tells])
    [(epochs, metrics, is_last)] = tells.told
    assert (epochs, is_last) == (1, True)
    assert isinstance(metrics["loss"], float)
    assert len(metrics["f1_score"]) == 3
    assert plain_metrics(metrics) == metrics
