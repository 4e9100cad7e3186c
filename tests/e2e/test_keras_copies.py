"""A Keras fit whose process is killed within an epoch continues from a copy, to the last bit."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from tests.e2e.journals import journal

import polytrain
from polytrain import (
    CheckpointConfig,
    DataConfig,
    FailureConfig,
    Result,
    RunConfig,
    ScalingConfig,
    make_trainer,
)

BATCHES, EPOCHS = 6, 3
STEPS = BATCHES * EPOCHS
LOSS = "sparse_categorical_crossentropy"


def network() -> Any:
    """With moving statistics and random numbers."""
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(4, activation="softmax"),
        ]
    )


def watched(model: Any, log: Path, dies_at: tuple[int, ...]) -> Any:
    """Have a model note each step that it has taken; each attempt dies after one of them."""
    own = model.make_train_function

    def make(force: bool = False) -> None:
        own(force)
        step = model.train_function

        def train(iterator: Any) -> Any:
            outputs = step(iterator)
            taken = int(model.optimizer.iterations)
            with log.open("a") as file:
                file.write(f"{taken}\n")
            attempt = polytrain.get_context().get_attempt()
            if attempt < len(dies_at) and taken == dies_at[attempt]:
                os.kill(os.getpid(), signal.SIGKILL)
            return outputs

        model.train_function = train

    model.make_train_function = make
    return model


def callbacks() -> list[Any]:
    """Each changes the training by a state, or when an epoch begins."""
    return [
        keras.callbacks.ReduceLROnPlateau(monitor="val_loss", patience=1, min_delta=1.0),
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.75),
        keras.callbacks.EarlyStopping(monitor="loss", patience=9, restore_best_weights=True),
    ]


def from_options(log: Path, dies_at: tuple[int, ...]) -> dict[str, Any]:
    return {
        "model": lambda: watched(network(), log, dies_at),
        "compile": {"optimizer": "adam", "loss": LOSS, "metrics": ["accuracy"]},
        "epochs": EPOCHS,
        "label": "y",
        "callbacks": callbacks,
    }


def by_function(log: Path, dies_at: tuple[int, ...]) -> dict[str, Any]:
    def train() -> None:
        from polytrain_tf.reporting import ReportCallback, checkpointed_epoch, checkpointed_model

        model = checkpointed_model()
        if model is None:
            model = network()
            model.compile(optimizer="adam", loss=LOSS, metrics=["accuracy"])
        data = {
            name: polytrain.get_dataset_shard(name).to_tf(
                feature_columns="x", label_columns="y", batch_size=32
            )
            for name in ("train", "valid")
        }
        watched(model, log, dies_at).fit(
            data["train"],
            validation_data=data["valid"],
            initial_epoch=checkpointed_epoch(),
            epochs=EPOCHS,
            shuffle=False,
            verbose=0,
            callbacks=[ReportCallback(checkpoint_frequency=0), *callbacks()],
        )

    return {"train_loop_per_worker": train}


def fit(quiet: RunConfig, name: str, memory: Any = None, **options: Any) -> Result:
    numbers = np.random.default_rng(0)
    x = numbers.normal(size=(32 * BATCHES, 8)).astype("float32")
    y = numbers.integers(0, 4, 32 * BATCHES)
    return make_trainer(
        "tensorflow",
        **options,
        datasets={"train": {"x": x, "y": y}, "valid": {"x": x[:40], "y": y[:40]}},
        dataset_config={"train": DataConfig(shuffle=True)},
        scaling_config=ScalingConfig(num_workers=1),
        run_config=dataclasses.replace(
            quiet,
            name=name,
            failure_config=FailureConfig(max_failures=4),
            checkpoint_config=CheckpointConfig(memory=memory),
        ),
    ).fit()


def state(result: Result) -> list[bytes]:
    model = result.load_model()
    return [np.asarray(each).tobytes() for each in (*model.variables, *model.optimizer.variables)]


@pytest.mark.parametrize("made", [from_options, by_function])
def test_a_fit_continues_within_an_epoch(
    quiet: RunConfig, tmp_path: Path, made: Callable[..., dict[str, Any]]
) -> None:
    """Killed within two epochs, and before the last step of an epoch was noted."""
    dies_at = (4, 12, 15)
    killed, undisturbed = tmp_path / "killed-steps", tmp_path / "steps"
    result = fit(quiet, "killed", memory=1, **made(killed, dies_at))
    expected = fit(quiet, "undisturbed", **made(undisturbed, ()))
    assert result.restarts == 3
    steps = [int(line) for line in killed.read_text().splitlines()]
    assert steps == sorted([*range(1, STEPS + 1), *dies_at])
    assert state(result) == state(expected)
    assert result.history == expected.history


def test_a_callback_that_may_keep_a_sum_within_epochs_is_named(
    quiet: RunConfig, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its run continues from its last checkpoint."""

    class Sums(keras.callbacks.Callback):  # type: ignore[misc]  # keras has no types
        total = 0.0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.total += 1

    steps = tmp_path / "steps"
    options = from_options(steps, (BATCHES + 4,)) | {"callbacks": lambda: [Sums()]}
    result = fit(quiet, "sums", memory=1, **options)
    assert result.restarts == 1
    [_, again] = journal(result.path, "Launched")
    assert again["step"] == 0
    assert "the callback Sums may keep something from batch to batch" in capfd.readouterr().err
