"""Fits of Keras on several workers, for a comparison with one process: arguments and callbacks.

Each case is a row of the table in docs/tensorflow.md.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

ROWS, BATCH, EPOCHS = 32, 8, 3
GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(size=(ROWS, 3)).astype("float32")
Y = (X.sum(axis=1) > 0).astype("float32")

EXACT, DIFFERS, REFUSED = "exact", "differs", "refused"

Case = Callable[[Path], Mapping[str, Any]]
"""Given a directory, returns the arguments of `fit` that differ from the plain ones."""


class Batches(keras.utils.PyDataset):  # type: ignore[misc]  # keras has no types
    """The rows, in their order."""

    def __len__(self) -> int:
        return ROWS // BATCH

    def __getitem__(self, number: int) -> Any:
        rows = slice(BATCH * number, BATCH * (number + 1))
        return X[rows], Y[rows]


class Watches(keras.callbacks.Callback):  # type: ignore[misc]  # as above
    """A callback of a user's own."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.model.optimizer.learning_rate > 0.01:
            self.model.optimizer.learning_rate = 0.01


def tf_data() -> Any:
    return tf.data.Dataset.from_tensor_slices((X, Y))


def from_generator() -> Any:
    signature = (tf.TensorSpec((None, 3), tf.float32), tf.TensorSpec((None,), tf.float32))
    batches = Batches()
    return tf.data.Dataset.from_generator(
        lambda: (batches[number] for number in range(len(batches))), output_signature=signature
    )


ARGUMENTS: dict[str, tuple[str, Case]] = {
    "`x`, `y`: arrays": (EXACT, lambda _: {}),
    "`x`: `tf.data`": (EXACT, lambda _: {"x": tf_data().batch(BATCH), "y": None}),
    "`x`: `tf.data` of unknown length": (
        EXACT,
        lambda _: {"x": tf_data().filter(lambda x, y: True).batch(BATCH), "y": None},
    ),
    "`x`: `tf.data.Dataset.from_generator`": (
        EXACT,
        lambda _: {"x": from_generator(), "y": None},
    ),
    "`x`: `tf.data`, shuffled without a seed": (
        REFUSED,
        lambda _: {"x": tf_data().shuffle(ROWS).batch(BATCH), "y": None},
    ),
    "`x`: `PyDataset`": (REFUSED, lambda _: {"x": Batches(), "y": None, "batch_size": None}),
    "`x`: generator": (
        REFUSED,
        lambda _: {"x": (each for each in Batches()), "y": None, "batch_size": None},
    ),
    "`batch_size`": (EXACT, lambda _: {"batch_size": 16}),
    "`batch_size` that the number of workers doesn't divide": (
        DIFFERS,
        lambda _: {"batch_size": 5},
    ),
    "`epochs`": (EXACT, lambda _: {"epochs": 2}),
    "`verbose`": (EXACT, lambda _: {"verbose": 2}),
    "`callbacks`: `CallbackList`": (
        EXACT,
        lambda _: {"callbacks": keras.callbacks.CallbackList([Watches()], add_history=True)},
    ),
    "`validation_split`": (EXACT, lambda _: {"validation_split": 0.25}),
    "`validation_data`": (EXACT, lambda _: {"validation_data": (X[:16], Y[:16])}),
    "`shuffle`": (DIFFERS, lambda _: {"shuffle": True}),
    "`class_weight`": (EXACT, lambda _: {"class_weight": {0: 1.0, 1: 3.0}}),
    "`sample_weight`": (EXACT, lambda _: {"sample_weight": np.linspace(0, 1, ROWS)}),
    "`initial_epoch`": (EXACT, lambda _: {"initial_epoch": 1}),
    "`steps_per_epoch`": (EXACT, lambda _: {"steps_per_epoch": 2}),
    "`validation_steps`": (
        EXACT,
        lambda _: {"validation_data": (X, Y), "validation_steps": 2},
    ),
    "`validation_batch_size`": (
        EXACT,
        lambda _: {"validation_data": (X, Y), "validation_batch_size": 16},
    ),
    "`validation_freq`": (EXACT, lambda _: {"validation_data": (X, Y), "validation_freq": 2}),
}
"""Rows that begin with a name of an argument of `fit`."""


def one(callback: Any, **options: Any) -> Mapping[str, Any]:
    return {"callbacks": [callback], **options}


CALLBACKS: dict[str, tuple[str, Case]] = {
    "`BackupAndRestore`": (
        REFUSED,
        lambda path: one(keras.callbacks.BackupAndRestore(path / "backup")),
    ),
    "`CSVLogger`": (EXACT, lambda path: one(keras.callbacks.CSVLogger(path / "log.csv"))),
    "`Callback`: your own": (EXACT, lambda _: one(Watches())),
    "`EarlyStopping`": (
        EXACT,
        lambda _: one(
            keras.callbacks.EarlyStopping(
                monitor="loss", min_delta=10.0, patience=1, restore_best_weights=True
            )
        ),
    ),
    "`History`": (EXACT, lambda _: one(keras.callbacks.History())),
    "`LambdaCallback`": (
        EXACT,
        lambda _: one(keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: None)),
    ),
    "`LearningRateScheduler`": (
        EXACT,
        lambda _: one(keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)),
    ),
    "`ModelCheckpoint`": (
        EXACT,
        lambda path: one(
            keras.callbacks.ModelCheckpoint(
                path / "best.keras", monitor="loss", save_best_only=True
            )
        ),
    ),
    "`OrbaxCheckpoint`": (
        REFUSED,
        # It can't be made where Orbax isn't installed.
        lambda _: one(keras.callbacks.OrbaxCheckpoint.__new__(keras.callbacks.OrbaxCheckpoint)),
    ),
    "`ProgbarLogger`": (EXACT, lambda _: one(keras.callbacks.ProgbarLogger())),
    "`ReduceLROnPlateau`": (
        EXACT,
        lambda _: one(
            keras.callbacks.ReduceLROnPlateau(monitor="loss", min_delta=10.0, patience=1)
        ),
    ),
    "`RemoteMonitor`": (
        EXACT,
        lambda _: one(keras.callbacks.RemoteMonitor(root="http://127.0.0.1:9")),
    ),
    "`SwapEMAWeights`": (
        EXACT,
        lambda _: one(keras.callbacks.SwapEMAWeights(swap_on_epoch=True), use_ema=True),
    ),
    "`TensorBoard`": (EXACT, lambda path: one(keras.callbacks.TensorBoard(path / "board"))),
    "`TerminateOnNaN`": (EXACT, lambda _: one(keras.callbacks.TerminateOnNaN())),
}
"""Rows of Keras's callbacks."""

CASES = {**ARGUMENTS, **CALLBACKS}


def built(*, use_ema: bool) -> Any:
    """A compiled model, always with the same weights."""
    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)]
    )
    begins = [np.linspace(-1, 1, each.size).reshape(each.shape) for each in model.get_weights()]
    model.set_weights(begins)
    adam = keras.optimizers.Adam(0.05, use_ema=use_ema, ema_momentum=0.5)
    model.compile(optimizer=adam, loss="mse")
    return model


def outcome(name: str, path: Path) -> dict[str, Any]:
    """What one of the cases ends in: numbers, or an error.

    Args:
        name: of the case.
        path: a directory for files of callbacks.
    """
    path.mkdir()
    options = {"batch_size": BATCH, "epochs": EPOCHS, "shuffle": False, "verbose": 0}
    options |= {"x": X, "y": Y, **CASES[name][1](path)}
    if isinstance(options["x"], tf.data.Dataset):
        del options["batch_size"]
    model = built(use_ema=options.pop("use_ema", False))
    if isinstance(options.get("callbacks"), keras.callbacks.CallbackList):
        options["callbacks"].set_model(model)
    try:
        history = model.fit(**options).history
    except ValueError as error:
        return {"refused": str(error)}
    found = {name: [float(each) for each in values] for name, values in history.items()}
    found["weights"] = [float(each) for array in model.get_weights() for each in array.ravel()]
    return found


def written(path: Path) -> dict[str, Any]:
    """What callbacks have written into a directory."""
    found = {}
    if (path / "log.csv").exists():
        with (path / "log.csv").open() as file:
            found["logged"] = [float(row["loss"]) for row in csv.DictReader(file)]
    if (path / "best.keras").exists():
        best = keras.models.load_model(path / "best.keras")
        found["best"] = [float(each) for array in best.get_weights() for each in array.ravel()]
    return found
