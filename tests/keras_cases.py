"""Fits of Keras on several workers, for a comparison with one process: arguments and callbacks.

Each case is named in the table in docs/keras.md. This module is sent to the workers, and doesn't
import Keras: a worker chooses its backend before.
"""

from __future__ import annotations

import csv
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

ROWS, BATCH, EPOCHS = 32, 8, 3
GENERATOR = np.random.default_rng(0)
X = GENERATOR.normal(size=(ROWS, 3)).astype("float32")
Y = (X.sum(axis=1, keepdims=True) > 0).astype("float32")

EXACT, DIFFERS, REFUSED = "exact", "differs", "refused"


@dataclass(frozen=True, kw_only=True)
class Part:
    """A worker's part of the rows: all of them, if it is alone or TensorFlow splits them."""

    rank: int = 0
    size: int = 1
    path: Path
    """A directory for files of callbacks."""

    def of(self, rows: Any, batch: int = BATCH) -> Any:
        """This worker's rows of each batch, one after another."""
        shape = (-1, self.size, batch // self.size, *rows.shape[1:])
        return rows.reshape(shape)[:, self.rank].reshape(-1, *rows.shape[1:])

    @property
    def batch(self) -> int:
        return BATCH // self.size


@dataclass(frozen=True, kw_only=True)
class Case:
    """A row of the table."""

    verdict: str = EXACT
    fit: Callable[[Part], Mapping[str, Any]] = lambda part: {}
    """Arguments of `fit` that differ from the plain ones."""

    optimizer: Mapping[str, Any] = field(default_factory=dict)
    compile: Mapping[str, Any] = field(default_factory=dict)
    policy: str = "float32"


def of_batches(part: Part, rows: int) -> Mapping[str, Any]:
    """Batches of so many rows, those of all workers."""
    return {"x": part.of(X, rows), "y": part.of(Y, rows), "batch_size": rows // part.size}


def batches(part: Part) -> list[Any]:
    x, y = part.of(X), part.of(Y)
    return [
        (x[at : at + part.batch], y[at : at + part.batch]) for at in range(0, len(x), part.batch)
    ]


def generator(part: Part) -> Mapping[str, Any]:
    made = batches(part)
    steps = len(made)
    endless = (made[number % steps] for number in range(steps * EPOCHS))
    return {"x": endless, "y": None, "batch_size": None, "steps_per_epoch": steps}


def py_dataset(part: Part) -> Mapping[str, Any]:
    import keras

    made = batches(part)

    class Batches(keras.utils.PyDataset):  # type: ignore[misc]  # keras has no types
        def __len__(self) -> int:
            return len(made)

        def __getitem__(self, number: int) -> Any:
            return made[number]

    return {"x": Batches(), "y": None, "batch_size": None}


def validation(part: Part, rows: int = 16, **options: Any) -> Mapping[str, Any]:
    return {"validation_data": (part.of(X[:rows]), part.of(Y[:rows])), **options}


def watches() -> Any:
    import keras

    class Watches(keras.callbacks.Callback):  # type: ignore[misc]  # keras has no types
        """A callback of a user's own."""

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if self.model.optimizer.learning_rate > 0.01:
                self.model.optimizer.learning_rate = 0.01

    return Watches()


def callback_list() -> Any:
    import keras

    return keras.callbacks.CallbackList([watches()], add_history=True)


ARGUMENTS: dict[str, Case] = {
    "`x` and `y`: arrays": Case(),
    "`x`: `PyDataset`": Case(fit=py_dataset),
    "`x`: generator": Case(fit=generator),
    "`batch_size`": Case(fit=lambda part: of_batches(part, 4)),
    "`epochs`": Case(fit=lambda part: {"epochs": 2}),
    "`verbose`": Case(fit=lambda part: {"verbose": 2}),
    "`callbacks`: `CallbackList`": Case(fit=lambda part: {"callbacks": callback_list()}),
    "`validation_split`": Case(fit=lambda part: {"validation_split": 0.25}),
    "`validation_data`": Case(fit=validation),
    "`shuffle`": Case(verdict=DIFFERS, fit=lambda part: {"shuffle": True}),
    "`class_weight`": Case(fit=lambda part: {"class_weight": {0: 1.0, 1: 3.0}}),
    "`sample_weight`": Case(
        fit=lambda part: {"sample_weight": part.of(np.linspace(0, 1, ROWS, dtype="float32"))}
    ),
    "`initial_epoch`": Case(fit=lambda part: {"initial_epoch": 1}),
    "`steps_per_epoch`": Case(fit=lambda part: {"steps_per_epoch": 2}),
    "`validation_steps`": Case(fit=lambda part: validation(part, ROWS, validation_steps=2)),
    "`validation_batch_size`": Case(
        fit=lambda part: validation(part, validation_batch_size=4 // part.size)
    ),
    "`validation_freq`": Case(fit=lambda part: validation(part, validation_freq=2)),
}
"""Rows that begin with a name of an argument of `fit`, whatever Keras runs on."""


def callback(name: str, *arguments: Any, **options: Any) -> Callable[[Part], Mapping[str, Any]]:
    def fit(part: Part) -> Mapping[str, Any]:
        import keras

        return {"callbacks": [getattr(keras.callbacks, name)(*arguments, **options)]}

    return fit


def file_of(name: str, file: str, **options: Any) -> Callable[[Part], Mapping[str, Any]]:
    """A callback that writes files: rank 0's alone."""

    def fit(part: Part) -> Mapping[str, Any]:
        made = callback(name, str(part.path / file), **options)(part)
        return made if part.rank == 0 else {}

    return fit


def orbax(part: Part) -> Mapping[str, Any]:
    import keras

    # It can't be made where Orbax isn't installed.
    return {"callbacks": [keras.callbacks.OrbaxCheckpoint.__new__(keras.callbacks.OrbaxCheckpoint)]}


def nothing(*_: Any) -> None:
    """Called at the end of an epoch."""


CALLBACKS: dict[str, Case] = {
    "`BackupAndRestore`": Case(verdict=REFUSED, fit=callback("BackupAndRestore", "backup")),
    "`CSVLogger`": Case(fit=file_of("CSVLogger", "log.csv")),
    "`Callback`: your own": Case(fit=lambda part: {"callbacks": [watches()]}),
    "`EarlyStopping`": Case(
        fit=callback(
            "EarlyStopping", monitor="loss", min_delta=10.0, patience=1, restore_best_weights=True
        )
    ),
    "`History`": Case(fit=callback("History")),
    "`LambdaCallback`": Case(fit=callback("LambdaCallback", on_epoch_end=nothing)),
    "`LearningRateScheduler`": Case(
        fit=callback("LearningRateScheduler", lambda epoch, rate: rate / 2)
    ),
    "`ModelCheckpoint`": Case(
        fit=file_of("ModelCheckpoint", "best.keras", monitor="loss", save_best_only=True)
    ),
    "`OrbaxCheckpoint`": Case(verdict=REFUSED, fit=orbax),
    "`ProgbarLogger`": Case(fit=callback("ProgbarLogger")),
    "`ReduceLROnPlateau`": Case(
        fit=callback("ReduceLROnPlateau", monitor="loss", min_delta=10.0, patience=1)
    ),
    "`RemoteMonitor`": Case(fit=callback("RemoteMonitor", root="http://127.0.0.1:9")),
    "`SwapEMAWeights`": Case(
        fit=callback("SwapEMAWeights", swap_on_epoch=True),
        optimizer={"use_ema": True, "ema_momentum": 0.5},
    ),
    "`TensorBoard`": Case(fit=file_of("TensorBoard", "board")),
    "`TerminateOnNaN`": Case(fit=callback("TerminateOnNaN")),
}
"""Rows of Keras's callbacks."""


def built(case: Case) -> Any:
    """A compiled model, always with the same weights."""
    import keras

    layers = [keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((3,)), *layers])
    begins = [np.linspace(-1, 1, each.size).reshape(each.shape) for each in model.get_weights()]
    model.set_weights(begins)
    optimizer = keras.optimizers.Adam(0.05, **case.optimizer)
    model.compile(optimizer=optimizer, loss="mse", **case.compile)
    return model


def outcome(
    case: Case, part: Part, *, prepare: Callable[[Any], Any] = lambda model: model
) -> dict[str, Any]:
    """What a case ends in: numbers, or an error.

    Args:
        case: the case.
        part: this worker's part.
        prepare: is called with the model before it is fitted.
    """
    import keras

    part.path.mkdir(parents=True, exist_ok=True)
    options = {"x": part.of(X), "y": part.of(Y), "batch_size": part.batch, "epochs": EPOCHS}
    options |= {"shuffle": False, "verbose": 0, **case.fit(part)}
    keras.config.set_dtype_policy(case.policy)
    try:
        model = built(case)
    finally:
        keras.config.set_dtype_policy("float32")
    if isinstance(options.get("callbacks"), keras.callbacks.CallbackList):
        options["callbacks"].set_model(model)
    prepare(model)
    try:
        history = model.fit(**options).history
    except ValueError as error:
        return {"refused": str(error)}
    found = {metric: [float(each) for each in values] for metric, values in history.items()}
    found["weights"] = [float(each) for array in model.get_weights() for each in array.ravel()]
    return found


def written(path: Path) -> dict[str, Any]:
    """What callbacks have written into a directory."""
    import keras

    found = {}
    if (path / "log.csv").exists():
        with (path / "log.csv").open() as file:
            found["logged"] = [float(row["loss"]) for row in csv.DictReader(file)]
    if (path / "best.keras").exists():
        best = keras.models.load_model(path / "best.keras")
        found["best"] = [float(each) for array in best.get_weights() for each in array.ravel()]
    return found


def shown(
    ours: Mapping[str, Any], alone: Mapping[str, Any], *, relative: float, absolute: float
) -> str:
    """The verdict that two outcomes show: of several workers, and of one process."""
    if set(ours) == {"refused"}:
        return REFUSED
    is_same = set(ours) == set(alone) and all(
        len(ours[each]) == len(alone[each])
        and np.allclose(ours[each], alone[each], rtol=relative, atol=absolute)
        for each in ours
    )
    return EXACT if is_same else DIFFERS


def assert_nothing_is_left_out(arguments: Iterable[str]) -> None:
    """Assert that there are rows for all arguments and callbacks of the installed Keras.

    Args:
        arguments: the names of the rows of arguments.
    """
    import keras

    found = {word for name in arguments for word in re.findall(r"`(\w+)`", name.split(":")[0])}
    assert set(inspect.signature(keras.Model.fit).parameters) - {"self"} <= found
    kinds = {name for name, kind in vars(keras.callbacks).items() if isinstance(kind, type)} - {
        "CallbackList"
    }
    assert {re.findall(r"`(\w+)`", name)[0] for name in CALLBACKS} == kinds
