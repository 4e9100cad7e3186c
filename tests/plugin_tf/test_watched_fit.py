"""`model.fit` while a training function runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from polytrain.workers.metrics import plain_metrics
from polytrain_tf.watched_fit import fit_watched


def strategy(replicas: int) -> Any:
    return SimpleNamespace(num_replicas_in_sync=replicas)


def fit() -> list[float]:
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(loss="mse")
    losses: list[float] = model.fit(np.ones((4, 1)), np.ones(4), verbose=0).history["loss"]
    return losses


def test_a_keras_that_can_not_fit_on_several_workers_says_so_at_once() -> None:
    why = RuntimeError("Keras 99")
    with (
        fit_watched(strategy(2), rank=0, has_shards=lambda: False, unfit=why),
        pytest.raises(RuntimeError, match="Keras 99"),
    ):
        fit()


def test_one_worker_fits_whatever_it_likes() -> None:
    own = keras.Model.fit
    with fit_watched(strategy(1), rank=0, has_shards=lambda: True, unfit=None):
        assert len(fit()) == 1
    assert keras.Model.fit is own


def test_its_tensors_are_metrics() -> None:
    assert plain_metrics({"loss": tf.constant(1.5), "steps": tf.Variable(3)}) == {
        "loss": 1.5,
        "steps": 3,
    }
    with pytest.raises(TypeError, match=r"'losses'.*its mean"):
        plain_metrics({"losses": tf.constant([1.5, 2.5])})
