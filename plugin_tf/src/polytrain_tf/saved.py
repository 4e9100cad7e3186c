"""Saves and loads Keras models, with the progress of training and the layers' random states.

This uses only Keras, so it works with all of its backends.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np

import polytrain
from polytrain import CheckpointError
from polytrain_tf.backend import MODEL_FILE

_SAFE_FROM = (3, 11)
"""The first Keras version without known bypasses of safe mode (CVE-2025-1550, 8747 and 9906)."""

_PROGRESS_FILE = "progress.json"
_SEEDS_FILE = "seeds.npz"
_METADATA = "metadata.json"
_DATE = "date_saved"
_SHARED = "shared_object_id"
_LONG_AGO = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The progress of training."""

    epochs: int = 0
    """Number of finished epochs."""

    is_over: bool = False
    """Whether a callback has ended training."""

    fit: int = 1
    """Number of the fit in the training function, from 1."""

    features: tuple[str, ...] | None = None
    """The columns that the model was trained on; None with a training function."""


def save(model: Any, directory: Path, progress: Progress) -> None:
    """Write Keras's own file, with layers, weights and optimizer, and the progress and seeds.

    Equal models give equal files, so metrics are reset first. The model may be of tf_keras.
    """
    model.reset_metrics()
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        model.save(Path(scratch, MODEL_FILE))
        _write_normalised(Path(scratch, MODEL_FILE), directory / MODEL_FILE)
    if isinstance(model, keras.Model):
        # Keras doesn't restore the random states of layers when it loads a model.
        np.savez(directory / _SEEDS_FILE, *map(np.asarray, _seeds(model)))
    (directory / _PROGRESS_FILE).write_text(json.dumps(asdict(progress)))


@contextmanager
def reported(metrics: Mapping[str, Any]) -> Iterator[Path]:
    """Yield a directory for a model, then report it as a checkpoint. All ranks call this.

    Only rank 0's files become the checkpoint. Every rank must write, because reading some of a
    model's variables is a collective operation.
    """
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory)
        is_kept = polytrain.get_context().get_world_rank() == 0
        checkpoint = polytrain.Checkpoint.from_directory(directory) if is_kept else None
        polytrain.report(metrics, checkpoint=checkpoint)


def load(directory: Path, custom_objects: Mapping[str, Any] | None = None) -> Any:
    """Return the saved model, compiled as it was.

    Args:
        directory: the checkpoint's directory.
        custom_objects: name → class or function that Keras doesn't know.

    Raises:
        CheckpointError: this Keras version could run code from the file, tf_keras wrote the file,
            or a class or function that the model uses isn't registered.
    """
    if _version() < _SAFE_FROM:
        raise CheckpointError(
            f"Keras {keras.__version__} can run code that is hidden in a model's file, even in its "
            f"safe mode. Install a newer one to load the model: pip install 'keras>={_SAFE_FROM[0]}"
            f".{_SAFE_FROM[1]}'."
        )
    version = _version_of(directory / MODEL_FILE)
    if version.startswith("2."):
        raise CheckpointError(
            f"The model was saved by tf_keras {version}, and Keras {keras.__version__} can't read "
            f"it. Load it with tf_keras.models.load_model({str(directory / MODEL_FILE)!r})."
        )
    try:
        model = keras.models.load_model(directory / MODEL_FILE, custom_objects=custom_objects)
    except TypeError as error:
        lacking = re.search(r"Could not locate (\w+) '([^']+)'", str(error))
        if lacking is None:
            raise
        kind, name = lacking.groups()
        raise CheckpointError(
            f"The model uses the {kind} {name!r}, whose code isn't in the checkpoint. Import the "
            "module that registers it with keras.saving.register_keras_serializable, or pass it: "
            f"custom_objects={{{name!r}: {name}}} for predict()."
        ) from error
    # A training function may have written only the model.
    if (directory / _SEEDS_FILE).exists():
        _load_seeds(model, directory)
    return model


def _version() -> tuple[int, ...]:
    return tuple(int(part) for part in keras.__version__.split(".")[:2])


def _version_of(file: Path) -> str:
    """Return the version of Keras that wrote a model's file; "" if unknown."""
    if not zipfile.is_zipfile(file):
        return ""
    with zipfile.ZipFile(file) as opened:
        if _METADATA not in opened.namelist():
            return ""
        return str(json.loads(opened.read(_METADATA)).get("keras_version", ""))


def load_into(model: Any, directory: Path) -> None:
    """Load saved weights, optimizer and random states into a built and compiled model."""
    model.load_weights(directory / MODEL_FILE)
    _load_seeds(model, directory)


def has_progress(directory: Path) -> bool:
    """Return whether the progress was saved; a training function may have saved only the model."""
    return (directory / _PROGRESS_FILE).exists()


def progress_of(directory: Path) -> Progress:
    """Return the progress of training in a checkpoint."""
    values = json.loads((directory / _PROGRESS_FILE).read_text())
    features = values.get("features")
    return Progress(**{**values, "features": None if features is None else tuple(features)})


def _load_seeds(model: Any, directory: Path) -> None:
    with np.load(directory / _SEEDS_FILE) as saved:
        for seed, name in zip(_seeds(model), saved.files, strict=True):
            seed.assign(saved[name])


def _seeds(model: Any) -> list[Any]:
    """Return the states of the model's random number generators."""
    return [each for each in model.variables if each.path.endswith("seed_generator_state")]


def _write_normalised(source: Path, target: Path) -> None:
    """Copy a `.keras` file without the date and memory addresses, which differ for equal models."""
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
    """Return a model's description without the date, with shared objects numbered in order."""
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
