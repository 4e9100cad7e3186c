"""Keras models in checkpoints, with the progress of training and the layers' random states.

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
"""The first Keras whose safe mode has no known way around it (CVE-2025-1550, 8747 and 9906)."""

_PROGRESS_FILE = "progress.json"
_SEEDS_FILE = "seeds.npz"
_METADATA = "metadata.json"
_DATE = "date_saved"
_SHARED = "shared_object_id"
_LONG_AGO = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far training has come."""

    epochs: int = 0
    """Number of finished epochs."""

    is_over: bool = False
    """Whether a callback has ended it."""

    fit: int = 1
    """Number of the fit in the training function."""

    features: tuple[str, ...] | None = None
    """The columns that the model was trained on, without a training function."""


def save(model: Any, directory: Path, progress: Progress) -> None:
    """Write Keras's own file, with layers, weights and optimizer, and the rest beside it.

    Equal models make equal files, so the metrics are reset before. The model may be one of
    tf_keras.
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
    """Yield a directory for a model, and report what was written there. All ranks call this.

    Every rank writes, and rank 0's files are the checkpoint: a strategy sums some of a model's
    variables when they are read.
    """
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory)
        is_kept = polytrain.get_context().get_world_rank() == 0
        checkpoint = polytrain.Checkpoint.from_directory(directory) if is_kept else None
        polytrain.report(metrics, checkpoint=checkpoint)


def load(directory: Path, custom_objects: Mapping[str, Any] | None = None) -> Any:
    """The model, compiled as it was.

    Args:
        directory: of the checkpoint.
        custom_objects: names to classes and functions that Keras doesn't know.

    Raises:
        CheckpointError: this Keras could run code from the file, the file is one of tf_keras, or it
            needs classes or functions that aren't here.
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
    """The version of the Keras that wrote a model's file; empty if that isn't known."""
    if not zipfile.is_zipfile(file):
        return ""
    with zipfile.ZipFile(file) as opened:
        if _METADATA not in opened.namelist():
            return ""
        return str(json.loads(opened.read(_METADATA)).get("keras_version", ""))


def load_into(model: Any, directory: Path) -> None:
    """Load the saved weights and optimizer into a model that is built and compiled."""
    model.load_weights(directory / MODEL_FILE)
    _load_seeds(model, directory)


def has_progress(directory: Path) -> bool:
    """Whether the progress was saved: a training function may have written only the model."""
    return (directory / _PROGRESS_FILE).exists()


def progress_of(directory: Path) -> Progress:
    """How far training had come."""
    values = json.loads((directory / _PROGRESS_FILE).read_text())
    features = values.get("features")
    return Progress(**{**values, "features": None if features is None else tuple(features)})


def _load_seeds(model: Any, directory: Path) -> None:
    with np.load(directory / _SEEDS_FILE) as saved:
        for seed, name in zip(_seeds(model), saved.files, strict=True):
            seed.assign(saved[name])


def _seeds(model: Any) -> list[Any]:
    """The states of its random number generators."""
    return [each for each in model.variables if each.path.endswith("seed_generator_state")]


def _write_normalised(source: Path, target: Path) -> None:
    """Copy a `.keras` file without the parts that differ between equal models: the date, and the
    memory addresses of objects."""
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
    """A description without its date, and with its shared objects numbered in order."""
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
