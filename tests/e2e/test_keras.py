"""`model.fit` with the callback that reports, killed and gone on with."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from polytrain import FailureConfig, Result, RunConfig, ScalingConfig, make_trainer

X = np.random.default_rng(0).normal(size=(64, 3)).astype("float32")
DATA = {"x": X, "y": X.sum(axis=1)}


def train(config: dict[str, Any]) -> None:
    """With dropout, and an optimizer that remembers."""
    import os
    import signal

    import keras

    import polytrain
    import polytrain_tf
    from polytrain_tf.reporting import ReportCallback, checkpointed_epoch, checkpointed_model

    def build() -> Any:
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [
                keras.Input((3,)),
                keras.layers.Dense(8, activation="tanh"),
                keras.layers.Dropout(0.2),
                keras.layers.Dense(1),
            ]
        )
        model.compile(optimizer=keras.optimizers.Adam(0.05), loss="mse")
        return model

    class Dies(keras.callbacks.Callback):  # type: ignore[misc]  # it is Any here
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            context = polytrain.get_context()
            dies = context.get_world_rank() == 1 and context.get_attempt() == 0
            if dies and epoch == config["dies_in"]:
                os.kill(os.getpid(), signal.SIGKILL)

    with polytrain_tf.strategy().scope():
        model = checkpointed_model() or build()
    shard = polytrain.get_dataset_shard("train")
    model.fit(
        shard.to_tf(feature_columns="x", label_columns="y", batch_size=8),
        initial_epoch=checkpointed_epoch(),
        epochs=5,
        shuffle=False,
        verbose=0,
        callbacks=[ReportCallback(checkpoint_frequency=2), Dies()],
    )


def fit(quiet: RunConfig, *, dies_in: int = -1, workers: int = 2) -> Result:
    return make_trainer(
        "tensorflow",
        train,
        train_loop_config={"dies_in": dies_in},
        datasets={"train": DATA},
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=dataclasses.replace(quiet, failure_config=FailureConfig(max_failures=1)),
    ).fit()


def weights(result: Result) -> np.ndarray[Any, Any]:
    return np.concatenate([each.ravel() for each in result.load_model().get_weights()])


def test_a_killed_run_ends_in_the_same_weights(quiet: RunConfig) -> None:
    undisturbed, killed = fit(quiet), fit(quiet, dies_in=3)
    assert killed.restarts == 1
    np.testing.assert_allclose(weights(killed), weights(undisturbed), atol=1e-6)
    assert [report["epoch"] for report in killed.history] == [1, 2, 3, 4, 5]
    losses = [report["loss"] for report in killed.history]
    np.testing.assert_allclose(
        losses, [report["loss"] for report in undisturbed.history], atol=1e-6
    )


def test_one_worker_is_enough(quiet: RunConfig) -> None:
    result = fit(quiet, workers=1)
    assert result.metrics["epoch"] == 5
    assert weights(result).shape == (3 * 8 + 8 + 8 + 1,)
