"""Saves and loads Keras models, with the progress of training and the layers' states.

This uses only Keras, so it works with all of its backends.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import threading
import types
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np

import polytrain
from polytrain import CheckpointError
from polytrain.extension import nested_layers, scratch_directory
from polytrain_tf.backend import MODEL_FILE
from polytrain_tf.private import FIND_NAMED, optimized_by, undecayed_by

_SAFE_FROM = (3, 15)
"""The first Keras version in whose safe mode a file isn't known to run code, to read other files or
to take all memory (CVE-2025-1550 to CVE-2026-12570), but for what `_without_foreign_functions`
refuses."""

_KERAS = ("keras", "keras_cv", "keras_hub", "keras_nlp")
"""Packages in which Keras finds what a file names."""

_OF_MODELS = re.compile(
    r"keras\.(activations|constraints|initializers|losses|metrics|optimizers|regularizers)"
)
"""Modules whose functions Keras itself writes into a model's file."""

_loading = threading.RLock()
"""Held while Keras loads a file: what it is replaced in is the whole process's."""

_PROGRESS_FILE = "progress.json"
_LEFT_OUT_FILE = "seeds.npz"
"""What `_left_out` returns. The file's name is from when that was only generators' states."""

_GENERATOR = "arr_"
"""How names of generators' states begin, as NumPy has named them in older files."""

_OPTIMIZERS_FILE = "optimizers.json"
_SKIPPED = "Skipping variable loading for optimizer"
"""How Keras's warning begins that an optimizer's state isn't loaded."""

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

    ends_epoch: bool = False
    """Whether all batches of the next epoch are trained, and only its end is left."""


def save(model: Any, directory: Path, progress: Progress) -> None:
    """Write Keras's own file, the variables that it doesn't restore, and the progress.

    Equal models give equal files, so metrics are reset first. The model may be of tf_keras.
    """
    model.reset_metrics()
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        model.save(Path(scratch, MODEL_FILE))
        _write_normalised(Path(scratch, MODEL_FILE), directory / MODEL_FILE)
    if isinstance(model, keras.Model):
        left_out = {name: storable(each) for name, each in _left_out(model).items()}
        np.savez(directory / _LEFT_OUT_FILE, **left_out)
        # It doesn't build an optimizer of a model's own either, and then leaves its state out.
        (directory / _OPTIMIZERS_FILE).write_text(json.dumps(_optimizers_of(model)))
    (directory / _PROGRESS_FILE).write_text(json.dumps(asdict(progress)))


@contextmanager
def reported(metrics: Mapping[str, Any]) -> Iterator[Path]:
    """Yield a directory for a model, then report it as a checkpoint. All ranks call this.

    Only rank 0's files become the checkpoint. Every rank must write, because reading some of a
    model's variables is a collective operation.
    """
    # Not in the system's directory: report may end this process, and it would stay.
    with tempfile.TemporaryDirectory(dir=scratch_directory(), prefix="model-") as directory:
        yield Path(directory)
        is_kept = polytrain.get_context().get_world_rank() == 0
        checkpoint = polytrain.Checkpoint.from_directory(directory) if is_kept else None
        polytrain.report(metrics, checkpoint=checkpoint)


def load(
    directory: Path,
    custom_objects: Mapping[str, Any] | None = None,
    *,
    is_compiled: bool = True,
) -> Any:
    """Return the saved model, compiled as it was.

    Args:
        directory: the checkpoint's directory.
        custom_objects: name → class or function that Keras doesn't know.
        is_compiled: whether to compile it: only training needs the loss and the optimizer.

    Raises:
        CheckpointError: this Keras version could run code from the file, the file names a function
            that no model is made of, tf_keras wrote it, or a class or function that the model uses
            isn't registered.
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
        with _loading, FIND_NAMED.replaced(_without_foreign_functions):
            model = keras.models.load_model(
                directory / MODEL_FILE, custom_objects=custom_objects, compile=is_compiled
            )
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
    if (directory / _LEFT_OUT_FILE).exists():
        _load_left_out(model, directory)
    return model


def _without_foreign_functions(find: Callable[..., Any]) -> Callable[..., Any]:
    """Return Keras's search for what a file names, without functions that no model is made of.

    A layer calls the function that the file names, with arguments of the file. Keras refuses some
    of its own functions there, but not `TFSMLayer`: that loads a SavedModel from any place, which
    may then read and write any file.
    """

    def find_safe(
        name: Any, registered_name: Any, module: Any, obj_type: str, *rest: Any, **options: Any
    ) -> Any:
        found = find(name, registered_name, module, obj_type, *rest, **options)
        is_function = obj_type == "function" or isinstance(found, types.FunctionType)
        is_kerass = str(module).partition(".")[0] in _KERAS
        if is_function and is_kerass and not _OF_MODELS.fullmatch(module):
            raise CheckpointError(
                f"The model's file names {module}.{name} as a function that a layer calls. Keras "
                "writes no such file, and loading it could run code that is hidden elsewhere. If "
                "you trust it, load it with keras.saving.load_model(path, safe_mode=False)."
            )
        return found

    return find_safe


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


def load_to_resume(directory: Path, custom_objects: Mapping[str, Any] | None = None) -> Any:
    """Return the saved model with all that its training needs to continue.

    Raises:
        CheckpointError: as `load`; or a weight or an optimizer's state would be missing.
    """
    with warnings.catch_warnings():
        # Such an optimizer is loaded below.
        warnings.filterwarnings("ignore", message=_SKIPPED)
        model = load(directory, custom_objects)
    if (directory / _OPTIMIZERS_FILE).exists():
        _check_lora(model, directory)
        load_into(model, directory)
        _exclude_from_decay(model, directory)
    return model


def _check_lora(model: Any, directory: Path) -> None:
    """Check that a loaded model has LoRA where the saved one had it.

    Raises:
        CheckpointError: it hasn't.
    """
    with np.load(directory / _LEFT_OUT_FILE) as saved:
        numbers = {int(name.partition("/")[0]) for name in saved.files if "/weights/" in name}
    layers = nested_layers(model)
    lacking = [layers[each].path for each in numbers if not layers[each].lora_enabled]
    if lacking:
        raise CheckpointError(
            f"{type(model).__name__}: Keras doesn't enable LoRA again in {lacking[0]} when it "
            "loads the model, because that layer is inside another one. Use LoRA only in the "
            "model's own layers. On TensorFlow you may also give make_trainer a function that "
            "builds the model and enables LoRA: model=build."
        )


def load_into(model: Any, directory: Path) -> None:
    """Load saved weights, optimizers and states of layers into a compiled model with built layers.

    Raises:
        CheckpointError: a weight or an optimizer's state would be missing.
    """
    _build_optimizers(model, directory)
    # A train_step may never call the model, and Keras then takes it for one without weights.
    model.built = True
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=_SKIPPED)
        try:
            model.load_weights(directory / MODEL_FILE)
        except ValueError as error:
            if not re.search(_SKIPPED, str(error)):
                raise
            raise CheckpointError(
                f"{type(model).__name__}: an optimizer would continue as if training had just "
                f"begun, because its state can't be loaded: {error}\n"
                "Keep each optimizer in an attribute of the model, and make it in the model's "
                "__init__."
            ) from error
    _load_left_out(model, directory)


def variables_of(model: Any) -> list[Any]:
    """Return each variable of a model and of all of its optimizers once; not those of metrics."""
    optimizers = [each for _, each in _optimizers(model)]
    found = [*model.variables, *(one for each in optimizers for one in each.variables)]
    return list({id(each): each for each in found}.values())


def check_weights(model: Any, *, made: int, trained: int) -> None:
    """Raise an error if a restart would begin without weights that training has made.

    Raises:
        CheckpointError: a checkpoint has another number of weights than there are at first.
    """
    if made != trained:
        raise CheckpointError(
            f"{type(model).__name__}: {made} of its weights exist before it is trained, and "
            f"{trained} afterwards, so a restart would begin with new values for the others. Build "
            "all of its layers in its __init__, not first in its train_step."
        )


def has_progress(directory: Path) -> bool:
    """Return whether the progress was saved; a training function may have saved only the model."""
    return (directory / _PROGRESS_FILE).exists()


def progress_of(directory: Path) -> Progress:
    """Return the progress of training in a checkpoint."""
    values = json.loads((directory / _PROGRESS_FILE).read_text())
    features = values.get("features")
    return Progress(**{**values, "features": None if features is None else tuple(features)})


def storable(value: Any) -> Any:
    """Return a value as NumPy's files can hold it: bfloat16 as float32, which has its values."""
    array = np.asarray(value)
    return array.astype(np.float32) if array.dtype.kind == "V" else array


def _load_left_out(model: Any, directory: Path) -> None:
    """Load what the file has of the variables that a model has, too.

    The file may have weights of LoRA in a layer inside another, where a loaded model has none, but
    their sum. An older file has only the states of random number generators.

    Raises:
        CheckpointError: the file lacks the state of a random number generator.
    """
    variables = _left_out(model)
    with np.load(directory / _LEFT_OUT_FILE) as saved:
        lacking = [name for name in variables if name not in saved and name.startswith(_GENERATOR)]
        if lacking:
            raise CheckpointError(
                f"{type(model).__name__}: the checkpoint has no states of {len(lacking)} of its "
                "random number generators. Build the model as it was when it was saved."
            )
        for name, variable in variables.items():
            if name in saved:
                variable.assign(saved[name])


def _left_out(model: Any) -> dict[str, Any]:
    """Return the variables that Keras doesn't restore when it loads a model, by name.

    It resets the states of random number generators and of stateful layers. Of a layer with LoRA it
    saves the sum of its weights, and then begins with matrices of zeros, which never learn.
    """
    generators = [each for each in model.variables if each.path.endswith("seed_generator_state")]
    found = {f"{_GENERATOR}{number}": each for number, each in enumerate(generators)}
    for number, layer in enumerate(nested_layers(model)):
        states, weights = [], []
        if isinstance(layer, keras.layers.RNN) and layer.stateful:
            states = keras.tree.flatten(layer.states or [])
        if getattr(layer, "lora_enabled", False):
            weights = layer.weights
        for kind, variables in (("states", states), ("weights", weights)):
            found |= {f"{number}/{kind}/{place}": each for place, each in enumerate(variables)}
    return found


def _optimizers_of(model: Any) -> dict[str, Any]:
    """Return how many weights a model has, and which of them each of its optimizers is for.

    Keras's file doesn't tell either which of them the optimizer, or one in it, lets not decay.
    """
    numbers = {id(weight): number for number, weight in enumerate(model.weights)}
    built = {key: optimizer for key, optimizer in _optimizers(model) if optimizer.built}

    def numbered(variables: Sequence[Any]) -> list[int | None]:
        return [numbers.get(id(variable)) for variable in variables]

    return {
        "weights": len(numbers),
        "optimizers": {key: numbered(optimized_by(each)) for key, each in built.items()},
        "undecayed": {
            key: [numbered(undecayed_by(part)) for part in _parts(each)]
            for key, each in built.items()
        },
    }


def _parts(optimizer: Any) -> list[Any]:
    """Return an optimizer, and those that it wraps."""
    several = getattr(optimizer, "optimizers", None) or ()
    wrapped = (getattr(optimizer, "inner_optimizer", None), *several)
    optimizers = [each for each in wrapped if isinstance(each, keras.optimizers.Optimizer)]
    return [optimizer, *(part for each in optimizers for part in _parts(each))]


def _exclude_from_decay(model: Any, directory: Path) -> None:
    """Exclude the weights from decay that were excluded in the saved model."""
    saved = json.loads((directory / _OPTIMIZERS_FILE).read_text()).get("undecayed", {})
    weights = model.weights
    for key, optimizer in _optimizers(model):
        for part, numbers in zip(_parts(optimizer), saved.get(key, ()), strict=False):
            known = [weights[number] for number in numbers if number is not None]
            if known:
                part.exclude_from_weight_decay(var_list=known)


def _optimizers(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the optimizers in a model's attributes and those of its layers, each with its place."""
    for number, layer in enumerate(nested_layers(model)):
        for name, value in vars(layer).items():
            held = value.values() if isinstance(value, dict) else value
            for place, each in enumerate(
                held if isinstance(value, dict | list | tuple) else [value]
            ):
                if isinstance(each, keras.optimizers.Optimizer):
                    yield f"{number}/{name}/{place}", each


def _build_optimizers(model: Any, directory: Path) -> None:
    """Build each optimizer of a model for the weights that the saved one was built for."""
    if not (directory / _OPTIMIZERS_FILE).exists():
        # A training function may have written only the model.
        if model.optimizer is not None and not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        return
    saved = json.loads((directory / _OPTIMIZERS_FILE).read_text())
    weights = model.weights
    check_weights(model, made=len(weights), trained=saved["weights"])
    for key, optimizer in _optimizers(model):
        numbers = saved["optimizers"].get(key)
        if numbers is None or None in numbers:
            continue
        wanted = [weights[number] for number in numbers]
        if not optimizer.built:
            optimizer.build(wanted)
        elif optimizer is model.optimizer and not _are_same(optimized_by(optimizer), wanted):
            # Keras builds it for all weights when it loads a model.
            model.optimizer = type(optimizer).from_config(optimizer.get_config())
            model.optimizer.build(wanted)


def _are_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Return whether these are the same variables, whose `==` compares values."""
    return [id(each) for each in some] == [id(each) for each in others]


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
