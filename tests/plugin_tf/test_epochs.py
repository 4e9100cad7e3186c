"""Epochs as they are told, whatever their metrics are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from polytrain.text.metrics import plain_metrics
from polytrain_tf.epochs import EpochCallback
from polytrain_tf.saved import Progress
from polytrain_tf.watched_fit import fit_watched


class Tells(EpochCallback):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[int, Mapping[str, Any], bool]] = []

    def progress(self, epochs: int) -> Progress:
        return Progress(epochs=epochs)

    def report_epoch(self, epochs: int, metrics: Mapping[str, Any], *, is_last: bool) -> None:
        self.calls.append((epochs, metrics, is_last))


def test_metrics_of_several_numbers_are_lists() -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, activation="softmax")])
    model.compile(loss="categorical_crossentropy", metrics=[keras.metrics.F1Score()])
    tells = Tells()
    model.fit(np.ones((4, 2)), np.eye(3)[[0, 1, 2, 0]], verbose=0, callbacks=[tells])
    [(epochs, metrics, is_last)] = tells.calls
    assert (epochs, is_last) == (1, True)
    assert isinstance(metrics["loss"], float)
    assert len(metrics["f1_score"]) == 3
    assert plain_metrics(metrics) == metrics


def test_what_kept_an_earlier_fit_keeps_no_later_one() -> None:
    tells = Tells()
    tells.before_report = lambda metrics, epochs: pytest.fail("it has another model")
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(loss="mse")
    with fit_watched(tf.distribute.get_strategy(), rank=0, has_shards=lambda: False, unfit=None):
        model.fit(np.ones((4, 1)), np.ones(4), verbose=0, callbacks=[tells])
    assert len(tells.calls) == 1


class Watches(Tells):
    """What it finds when it is told."""

    def report_epoch(self, epochs: int, metrics: Mapping[str, Any], *, is_last: bool) -> None:
        rate = float(self.model.optimizer.learning_rate)
        self.calls.append(
            (epochs, {"rate": rate, "weight": self.model.get_weights()[1][0]}, is_last)
        )


@pytest.mark.parametrize("is_first", [True, False])
def test_an_epoch_is_reported_before_the_next_begins(is_first: bool) -> None:
    """And the last when all others have ended: wherever the callback is in the list."""
    watches = Watches()
    others = [
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2),
        keras.callbacks.EarlyStopping(
            monitor="loss", min_delta=10.0, patience=2, restore_best_weights=True
        ),
    ]
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(optimizer=keras.optimizers.SGD(0.125), loss="mse")
    with fit_watched(tf.distribute.get_strategy(), rank=0, has_shards=lambda: False, unfit=None):
        model.fit(
            np.ones((4, 1)),
            np.ones(4),
            epochs=9,
            verbose=0,
            callbacks=[watches, *others] if is_first else [*others, watches],
        )
    assert [is_last for _, _, is_last in watches.calls] == [False, False, True]
    assert [found["rate"] for _, found, _ in watches.calls] == [0.0625, 0.03125, 0.015625]
    assert watches.calls[-1][1]["weight"] == watches.calls[0][1]["weight"]
