"""`make_trainer("tensorflow", model=build, …)`: Keras's own numbers, also after a kill."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from sklearn.datasets import load_digits
from tests.sweeps import only_in_sweep

import polytrain
from polytrain import (
    CheckpointConfig,
    FailureConfig,
    Result,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
    make_trainer,
)

ROWS, VALID = 320, 160
MANY_ROWS = 1600
"""Enough to learn something from."""

EPOCHS = 3
COMPILE = {"optimizer": "adam", "loss": "sparse_categorical_crossentropy", "metrics": ["accuracy"]}


class Doubled(keras.layers.Layer):  # type: ignore[misc]  # keras has no types
    """Of a class that no file of Keras's can be loaded with, unless it is there already."""

    def call(self, inputs: Any) -> Any:
        return 2 * inputs


def build() -> Any:
    """Its first layer waits for rows."""
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.layers.Dense(32, activation="relu"),
            Doubled(),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )


def with_state() -> Any:
    """With variables that a strategy averages, and random numbers."""
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(32, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )


class Dies(keras.callbacks.Callback):  # type: ignore[misc]  # as above
    """Rank 1 in its first attempt, in the middle of the third epoch."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        context = polytrain.get_context()
        dies = context.get_world_rank() == 1 and context.get_attempt() == 0
        if dies and self.model.optimizer.iterations == 2 * (ROWS // 32) + 5:
            os.kill(os.getpid(), signal.SIGKILL)


def digits(rows: int = ROWS) -> dict[str, dict[str, np.ndarray[Any, Any]]]:
    found = load_digits()
    x, y = (found.data / 16).astype("float32"), found.target
    return {
        "train": {"x": x[:rows], "y": y[:rows]},
        "valid": {"x": x[rows : rows + VALID], "y": y[rows : rows + VALID]},
    }


def fit(
    quiet: RunConfig, *, workers: int = 2, frequency: int = 1, rows: int = ROWS, **options: Any
) -> Result:
    defaults = {"model": build, "compile": COMPILE, "epochs": EPOCHS, "label": "y"}
    return make_trainer(
        "tensorflow",
        **{**defaults, **options},
        datasets=digits(rows),
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=dataclasses.replace(
            quiet,
            failure_config=FailureConfig(max_failures=1),
            checkpoint_config=CheckpointConfig(checkpoint_frequency=frequency),
        ),
    ).fit()


def weights(model: Any) -> np.ndarray[Any, Any]:
    return np.concatenate([each.ravel() for each in model.get_weights()])


def slower() -> Any:
    return keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], Result]:
    """Runs a model, once, in which nobody dies."""

    @cache
    def run(model: Any) -> Result:
        quiet = RunConfig(storage_path=tmp_path_factory.mktemp("runs"), progress=False)
        return fit(quiet, model=model, callbacks=[slower()])

    return run


def test_the_numbers_are_those_of_one_process(undisturbed: Callable[[Any], Result]) -> None:
    result = undisturbed(build)
    data = digits()
    model = build()
    model.compile(**COMPILE)
    history = model.fit(
        *data["train"].values(),
        validation_data=tuple(data["valid"].values()),
        batch_size=32,
        epochs=EPOCHS,
        shuffle=False,
        verbose=0,
        callbacks=[slower()],
    ).history
    # Keras adds the rate, which isn't a result.
    del history["learning_rate"]
    for name, expected in history.items():
        ours = [report[name] for report in result.history]
        np.testing.assert_allclose(ours, expected, rtol=1e-4, err_msg=name)
    with keras.utils.custom_object_scope({"Doubled": Doubled}):
        np.testing.assert_allclose(weights(result.load_model()), weights(model), atol=1e-5)


def test_another_order_of_columns_changes_nothing(quiet: RunConfig) -> None:
    """The model is the first column, and stays it: so the loss is that of `y` against it."""
    rows = {"a": np.linspace(0, 1, 32), "b": np.linspace(5, 9, 32), "y": np.linspace(0, 1, 32)}

    def first_column() -> Any:
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.set_weights([np.array([[1.0], [0.0]]), np.zeros(1)])
        return model

    result = make_trainer(
        "tensorflow",
        model=first_column,
        compile=lambda: {"optimizer": keras.optimizers.SGD(0.0), "loss": "mse"},
        label="y",
        datasets={"train": rows, "valid": {name: rows[name] for name in ("b", "y", "a")}},
        scaling_config=ScalingConfig(num_workers=1),
        run_config=quiet,
    ).fit()
    assert result.metrics["loss"] < 1e-12
    assert result.metrics["val_loss"] < 1e-12


# In `make test`, `test_keras_copies` kills such a run, and one with two workers.
@pytest.mark.sweep
@pytest.mark.parametrize("model", [only_in_sweep(build), only_in_sweep(with_state)])
def test_a_killed_run_ends_in_the_same_weights(
    quiet: RunConfig, undisturbed: Callable[[Any], Result], model: Any
) -> None:
    expected = undisturbed(model)
    killed = fit(quiet, model=model, callbacks=[slower(), Dies()])
    assert killed.restarts == 1
    with keras.utils.custom_object_scope({"Doubled": Doubled}):
        np.testing.assert_allclose(
            weights(killed.load_model()), weights(expected.load_model()), atol=1e-6
        )
    losses = [report["loss"] for report in killed.history]
    assert len(losses) == EPOCHS
    np.testing.assert_allclose(losses, [each["loss"] for each in expected.history], atol=1e-6)


def ends_after_four() -> Any:
    return keras.callbacks.EarlyStopping(
        monitor="val_loss", min_delta=10.0, patience=3, restore_best_weights=True
    )


@dataclasses.dataclass(frozen=True)
class Ended:
    """A run that a callback has ended, and where others have written their files."""

    result: Result
    written: Path


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    quiet = RunConfig(storage_path=tmp_path_factory.mktemp("runs"), progress=False)
    written = tmp_path_factory.mktemp("written")
    callbacks = [
        ends_after_four(),
        keras.callbacks.ModelCheckpoint(written / "{epoch}.keras"),
        keras.callbacks.ModelCheckpoint(written / "best.keras", save_best_only=True),
        keras.callbacks.CSVLogger(written / "log.csv"),
    ]
    result = fit(quiet, epochs=9, callbacks=callbacks, model=with_state)
    return Ended(result, written)


def test_a_callback_that_ends_training_ends_it_everywhere(ended: Ended) -> None:
    """It has the metrics of all rows, and the last word on the weights."""
    assert len(ended.result.history) == 4
    first = keras.models.load_model(ended.written / "1.keras")
    found = weights(ended.result.load_model())
    np.testing.assert_allclose(found, weights(first), atol=1e-6)


@pytest.mark.only_in_sweep
def test_a_callback_that_ends_training_survives_a_death(quiet: RunConfig) -> None:
    """In `make test`, `test_keras` has one that counts on, and `test_callback_state` others."""

    def callbacks() -> list[Any]:
        return [ends_after_four(), Dies()]

    result = fit(quiet, epochs=9, callbacks=callbacks, model=with_state)
    assert result.restarts == 1
    assert len(result.history) == 4
    first = fit(quiet, epochs=1, frequency=0, model=with_state)
    np.testing.assert_allclose(weights(result.load_model()), weights(first.load_model()), atol=1e-6)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "limit", [only_in_sweep("clipnorm"), "global_clipnorm", only_in_sweep("clipvalue")]
)
def test_gradients_are_clipped_as_a_whole(quiet: RunConfig, limit: str) -> None:
    """Two workers end where one process does."""

    def fitted(workers: int) -> Any:
        def compiled() -> dict[str, Any]:
            optimizer = keras.optimizers.SGD(0.5, **{limit: 0.01})
            return {"optimizer": optimizer, "loss": COMPILE["loss"]}

        result = fit(quiet, workers=workers, epochs=1, compile=compiled)
        with keras.utils.custom_object_scope({"Doubled": Doubled}):
            return weights(result.load_model())

    np.testing.assert_allclose(fitted(2), fitted(0), atol=1e-5)


def test_files_of_callbacks_are_written_once(ended: Ended) -> None:
    """By rank 0; the others would be at the same file."""
    assert len((ended.written / "log.csv").read_text().splitlines()) == 1 + 4
    assert keras.models.load_model(ended.written / "best.keras").optimizer.iterations > 0


@pytest.mark.only_in_sweep
def test_one_worker_is_enough(quiet: RunConfig) -> None:
    """In `make test`, `test_keras_copies` has one that dies."""
    result = fit(quiet, workers=1, rows=MANY_ROWS, model=with_state, epochs=2)
    assert result.metrics["val_accuracy"] > 0.5
    assert result.load_model().optimizer.iterations == 2 * (MANY_ROWS // 32)


def nothing() -> None:
    """As a function whose author has forgotten to return what it has made."""


@pytest.mark.sweep(one_in=2)
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"model": dict}, r"model: the function returned a dict, not a keras\.Model\. Return"),
        (
            {"model": nothing},
            r"model: the function returned None, not a keras\.Model\. Return the model\.",
        ),
        (
            {"compile": nothing},
            "compile: the function returned None, not a dict. Return the arguments",
        ),
        ({"callbacks": nothing}, "callbacks: the function returned None, not a list. Return a"),
        ({"compile": {}}, "model: it isn't compiled. Pass compile="),
    ],
)
def test_what_only_the_workers_can_know(
    quiet: RunConfig, wrong: dict[str, Any], message: str
) -> None:
    with pytest.raises(TrainingFailedError, match=message):
        fit(quiet, workers=1, **wrong)


def test_a_loss_that_is_nan_is_warned_of_once(
    quiet: RunConfig, caplog: pytest.LogCaptureFixture
) -> None:
    make_trainer(
        "tensorflow",
        model=lambda: keras.Sequential([keras.layers.Dense(1)]),
        compile={"loss": "mse"},
        label="y",
        epochs=2,
        datasets={"train": {"x": np.array([1.0, np.nan]), "y": np.ones(2)}},
        scaling_config=ScalingConfig(num_workers=0),
        run_config=quiet,
    ).fit()
    messages = [each.getMessage() for each in caplog.records if "is NaN" in each.getMessage()]
    assert len(messages) == 1
    assert messages[0].startswith("The loss is NaN after epoch 1.")
