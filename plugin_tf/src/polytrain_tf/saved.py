"""Keras models in checkpoints: with how far training has come, and what layers draw next.

Of Keras alone, so it works on any of its backends.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np

from polytrain_tf.backend import MODEL_FILE

_PROGRESS_FILE = "progress.json"
_SEEDS_FILE = "seeds.npz"
_DATE = "date_saved"
_SHARED = "shared_object_id"
_LONG_AGO = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far training has come."""

    epochs: int = 0
    """That are done."""

    is_over: bool = False
    """Whether a callback has ended it."""


def save(model: Any, directory: Path, progress: Progress) -> None:
    """Write Keras's own file, with layers, weights and optimizer, and what it leaves out.

    Equal models make equal files: what the metrics have counted is no part of a model.
    """
    model.reset_metrics()
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        model.save(Path(scratch, MODEL_FILE))
        _write_normalised(Path(scratch, MODEL_FILE), directory / MODEL_FILE)
    # Keras begins the random numbers of layers anew when it loads a model.
    np.savez(directory / _SEEDS_FILE, *map(np.asarray, _seeds(model)))
    (directory / _PROGRESS_FILE).write_text(json.dumps(asdict(progress)))


def load(directory: Path) -> Any:
    """The model, compiled as it was."""
    model = keras.models.load_model(directory / MODEL_FILE)
    # A training function may have written the model alone.
    if (directory / _SEEDS_FILE).exists():
        _load_seeds(model, directory)
    return model


def load_into(model: Any, directory: Path) -> None:
    """Give a model that is built and compiled the weights and the optimizer that were saved."""
    model.load_weights(directory / MODEL_FILE)
    _load_seeds(model, directory)


def has_progress(directory: Path) -> bool:
    """Whether it is known: a training function may have written the model alone."""
    return (directory / _PROGRESS_FILE).exists()


def progress_of(directory: Path) -> Progress:
    """How far training had come."""
    return Progress(**json.loads((directory / _PROGRESS_FILE).read_text()))


def _load_seeds(model: Any, directory: Path) -> None:
    with np.load(directory / _SEEDS_FILE) as saved:
        for seed, name in zip(_seeds(model), saved.files, strict=True):
            seed.assign(saved[name])


def _seeds(model: Any) -> list[Any]:
    """The states of its random number generators."""
    return [each for each in model.variables if each.path.endswith("seed_generator_state")]


def _write_normalised(source: Path, target: Path) -> None:
    """Copy a `.keras` file without what differs between equal models: when it was written, and
    where in memory its objects were."""
    with zipfile.ZipFile(source) as read, zipfile.ZipFile(target, "w") as written:
        for name in sorted(read.namelist()):
            member = zipfile.ZipInfo(name, _LONG_AGO)
            if name.endswith(".json"):
                normalised = _normalised(json.loads(read.read(name)), {})
                written.writestr(member, json.dumps(normalised))
                continue
            with read.open(name) as of, written.open(member, "w", force_zip64=True) as to:
                shutil.copyfileobj(of, to)


def _normalised(value: Any, numbers: dict[int, int]) -> Any:
    """A description without its date, and with its shared objects numbered in their order."""
    if isinstance(value, list):
        return [_normalised(each, numbers) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        name: numbers.setdefault(each, len(numbers))
        if name == _SHARED
        else _normalised(each, numbers)
        for name, each in value.items()
        if name != _DATE
    }
