"""Declarative runs that start from a checkpoint with all of its epochs, or whose training ended."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from polytrain import Result, RunConfig, ScalingConfig, TrainingFailedError, make_trainer

X = np.random.default_rng(0).normal(size=(64, 3)).astype("float32")
DATA = {"c": X[:, 0], "a": X[:, 1], "b": X[:, 2], "y": X @ np.float32([1, -2, 0.5])}

Run = Callable[..., Result]


def build() -> Any:
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.layers.Dense(1)])


def stopping(patience: int) -> Callable[[], list[Any]]:
    """Make a callback that ends training after `patience` + 1 epochs."""
    return lambda: [
        keras.callbacks.EarlyStopping(monitor="val_loss", patience=patience, min_delta=100)
    ]


def file_of(result: Result, name: str) -> bytes:
    assert result.checkpoint is not None
    return Path(result.checkpoint.path, name).read_bytes()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    numbers = itertools.count()

    def train(epochs: int, callbacks: Any = (), data: Any = DATA, **options: Any) -> Result:
        return make_trainer(
            "tensorflow",
            model=build,
            compile={"optimizer": "adam", "loss": "mse"},
            epochs=epochs,
            batch_size=32,
            label="y",
            callbacks=callbacks,
            datasets={"train": data, "valid": data},
            scaling_config=ScalingConfig(num_workers=0),
            run_config=RunConfig(str(next(numbers)), storage_path=tmp_path, progress=False),
            **options,
        ).fit()

    return train


def test_without_the_callback_that_ended_it_training_goes_on(run: Run) -> None:
    ended = run(10, stopping(1))
    assert len(ended.history) == 2
    assert len(run(5, restore_from=ended.checkpoint).history) == 3


@pytest.mark.sweep(one_in=2)
@pytest.mark.parametrize(("epochs", "callbacks"), [(10, stopping(1)), (1, stopping(9)), (1, ())])
def test_a_run_with_nothing_left_hands_its_start_on(run: Run, epochs: int, callbacks: Any) -> None:
    """Also that start's epochs, features, and the state of its callbacks."""
    first = run(epochs, callbacks)
    second = run(epochs, callbacks, restore_from=first.checkpoint)
    assert second.finished
    assert second.history == ()
    np.testing.assert_array_equal(second.predict(DATA), first.predict(DATA))
    # Only the order of columns in the checkpoint tells which is which.
    reordered = {name: DATA[name] for name in ("b", "c", "a")}
    np.testing.assert_array_equal(second.predict(reordered), first.predict(DATA))
    for name in ("progress.json", *(["callback-states.npz"] if callbacks else [])):
        assert file_of(second, name) == file_of(first, name), name


def test_epochs_and_patience_are_those_of_all_runs(run: Run) -> None:
    """Also if one of them trains nothing."""
    first = run(2, stopping(3))
    second = run(2, stopping(3), restore_from=first.checkpoint)
    third = run(20, stopping(3), restore_from=second.checkpoint)
    assert len(third.history) == (3 + 1) - 2


def test_columns_keep_their_order_from_run_to_run(run: Run) -> None:
    first = run(2)
    reordered = {name: DATA[name] for name in ("b", "y", "c", "a")}
    second = run(2, data=reordered, restore_from=first.checkpoint)
    np.testing.assert_array_equal(second.predict(DATA), first.predict(DATA))
    whole = run(4)
    third = run(4, data=reordered, restore_from=second.checkpoint)
    np.testing.assert_allclose(third.predict(DATA), whole.predict(DATA), rtol=1e-5)


class BuiltInTraining(keras.Model):  # type: ignore[misc]  # keras has no types
    """A layer of it has no weights until the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.maker, self.critic = keras.layers.Dense(1), keras.layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.maker(x)

    def train_step(self, data: Any) -> Any:
        return {"made": keras.ops.mean(self.critic(data[0]))}


def test_a_run_that_no_restart_could_resume_ends_with_its_first_epoch(tmp_path: Path) -> None:
    trainer = make_trainer(
        "tensorflow",
        model=BuiltInTraining,
        compile={"optimizer": "adam", "loss": "mse"},
        epochs=9,
        label="y",
        datasets={"train": DATA},
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(storage_path=tmp_path, progress=False),
    )
    with pytest.raises(TrainingFailedError, match="Build all of its layers") as caught:
        trainer.fit()
    assert caught.value.result is not None
    assert caught.value.result.history == ()
