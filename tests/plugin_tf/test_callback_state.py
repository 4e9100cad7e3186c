"""Callbacks that watch for progress, in a fit that is interrupted: as in one that isn't."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from polytrain_tf.callback_state import load_callbacks, save_callbacks

X = np.ones((4, 3), dtype="float32")
Make = Callable[[], Any]


class Restored(keras.callbacks.Callback):  # type: ignore[misc]  # keras has no types
    def __init__(self, others: list[Any], directory: Path) -> None:
        super().__init__()
        self._others, self._directory = others, directory

    def on_train_begin(self, logs: Any = None) -> None:
        load_callbacks(self._others, self._directory)


def model() -> Any:
    """One whose loss hardly changes."""
    built = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="ones")])
    built.compile(optimizer=keras.optimizers.SGD(1e-6), loss="mse")
    return built


def early_stopping() -> Any:
    return keras.callbacks.EarlyStopping(
        monitor="loss", min_delta=0.1, patience=4, restore_best_weights=True
    )


def plateau() -> Any:
    return keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=3, cooldown=3, min_delta=0.1)


def epochs_of(callbacks: list[Any], begin: int, end: int, *more: Any) -> int:
    """Epochs that a fit has had."""
    return len(
        model()
        .fit(
            X,
            X.sum(axis=1) + 1,
            initial_epoch=begin,
            epochs=end,
            callbacks=[*callbacks, *more],
            verbose=0,
        )
        .epoch
    )


def test_patience_is_that_of_all_attempts(tmp_path: Path) -> None:
    assert epochs_of([early_stopping()], 0, 20) == 5
    first, second = [early_stopping()], [early_stopping()]
    assert epochs_of(first, 0, 3) == 3
    save_callbacks(first, tmp_path)
    assert epochs_of(second, 3, 20, Restored(second, tmp_path)) == 2
    assert second[0].best == first[0].best
    for ours, theirs in zip(second[0].best_weights, first[0].best_weights, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_plateau_is_as_long_as_it_was(tmp_path: Path) -> None:
    first, second = plateau(), plateau()
    epochs_of([first], 0, 5)
    assert first.cooldown_counter > 0
    save_callbacks([first], tmp_path)
    epochs_of([second], 5, 5, Restored([second], tmp_path))
    assert (second.wait, second.cooldown_counter, second.best) == (
        first.wait,
        first.cooldown_counter,
        first.best,
    )


def test_a_model_is_saved_after_the_same_batches(tmp_path: Path) -> None:
    def saving(name: str) -> Any:
        (tmp_path / name).mkdir(exist_ok=True)
        file = str(tmp_path / name / "{epoch}-{batch}.weights.h5")
        return keras.callbacks.ModelCheckpoint(file, save_freq=3, save_weights_only=True)

    epochs_of([saving("whole")], 0, 6)
    first, second = [saving("resumed")], [saving("resumed")]
    epochs_of(first, 0, 2)
    save_callbacks(first, tmp_path)
    epochs_of(second, 2, 6, Restored(second, tmp_path))
    # An epoch has one batch.
    for name in ("whole", "resumed"):
        files = {file.name for file in (tmp_path / name).iterdir()}
        assert files == {"3-1.weights.h5", "6-1.weights.h5"}, name


@pytest.mark.sweep(one_in=2)
@pytest.mark.parametrize("now", [[], [keras.callbacks.TerminateOnNaN], [plateau]])
def test_other_callbacks_than_before_begin_anew(tmp_path: Path, now: list[Make]) -> None:
    first = [early_stopping()]
    epochs_of(first, 0, 3)
    save_callbacks(first, tmp_path)
    others = [make() for make in now]
    epochs_of(others, 3, 4, Restored(others, tmp_path))
    assert all(getattr(callback, "wait", 0) == 0 for callback in others)


def test_callbacks_of_rank_0_alone_leave_those_of_other_ranks_their_state(tmp_path: Path) -> None:
    """Rank 0 saves: another rank with another state would stop, or lower its rate, by itself."""
    first, second = [plateau(), early_stopping()], early_stopping()
    epochs_of(first, 0, 3)
    save_callbacks([keras.callbacks.TerminateOnNaN(), *first], tmp_path)
    epochs_of([second], 3, 4, Restored([second], tmp_path))
    assert second.wait == 3
    assert second.best == first[1].best


def test_the_best_weights_may_be_of_bfloat16(tmp_path: Path) -> None:
    """NumPy's files don't know this type."""
    first, second = early_stopping(), early_stopping()
    layer = keras.layers.Dense(1, kernel_initializer="ones", dtype="bfloat16")
    layer.build((None, 3))
    first.on_train_begin()
    first.best_weights = layer.get_weights()
    save_callbacks([first], tmp_path)
    load_callbacks([second], tmp_path)
    layer.set_weights([2 * each for each in second.best_weights])
    np.testing.assert_array_equal(np.asarray(layer.get_weights()[0], "float32"), 2.0)


def test_callbacks_that_watch_nothing_leave_no_file(tmp_path: Path) -> None:
    save_callbacks([keras.callbacks.TerminateOnNaN()], tmp_path)
    assert list(tmp_path.iterdir()) == []
