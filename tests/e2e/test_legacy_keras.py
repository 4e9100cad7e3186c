"""`fit` of tf_keras, which Ray Train's scripts use, on a shard's batches."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from polytrain import Result, RunConfig, ScalingConfig, make_trainer

X = [[number / 10] for number in range(12)]
ROWS = {"x": X, "y": [2 * x for [x] in X]}


def train(config: dict[str, Any]) -> None:
    import os

    os.environ["TF_USE_LEGACY_KERAS"] = "1"
    import tensorflow as tf

    import polytrain
    import polytrain_tf

    shard = polytrain.get_dataset_shard("train")
    for fits in config["fits"]:
        with polytrain_tf.strategy().scope():
            dense = tf.keras.layers.Dense(1, kernel_initializer="zeros", input_shape=(1,))
            model = tf.keras.Sequential([dense])
            model.compile(optimizer=tf.keras.optimizers.SGD(0.1), loss="mse")
        losses = []
        for epochs in fits:
            dataset = shard.to_tf("x", "y", global_batch_size=6)
            losses += model.fit(dataset, epochs=epochs, verbose=0).history["loss"]
        steps = int(model.optimizer.iterations.numpy())
        whole = model.evaluate(shard.to_tf("x", "y", global_batch_size=6), verbose=0)
        polytrain.report({"losses": losses, "steps": steps, "whole": whole})


def fit(config: RunConfig, num_workers: int, fits: list[list[int]]) -> Result:
    """Trains a model from the beginning by each list of fits, of so many epochs each."""
    return make_trainer(
        "tensorflow",
        train,
        train_loop_config={"fits": fits},
        datasets={"train": ROWS},
        scaling_config=ScalingConfig(num_workers=num_workers),
        run_config=dataclasses.replace(config, name=f"{num_workers}"),
    ).fit()


def test_two_workers_train_each_epoch_as_one_does(quiet: RunConfig) -> None:
    [alone] = fit(quiet, 1, [[3]]).history
    assert alone["steps"] == 6
    together = fit(quiet, 2, [[3], [1, 1, 1]]).history
    assert len(together) == 2
    for found in together:
        assert found["steps"] == 6
        assert found["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        assert found["whole"] == pytest.approx(alone["whole"], rel=1e-5)
