"""Finds all problems of a request for predictions before anything starts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from polytrain.checkpoint.manifest import Manifest
from polytrain.config.constraints import Wrong
from polytrain.data.read.describe import Source, describe
from polytrain.data.read.transforms import wants_generator
from polytrain.data_errors import SourceError
from polytrain.functions.code_fingerprint import code_fingerprint, python_version
from polytrain.functions.function_checks import pickle_problems
from polytrain.prediction.output_files import OutputFiles
from polytrain.prediction.record import PredictionRecord, record_problems
from polytrain_plugins import Backend, Device, InvalidJobError, Problem, column_remedy
from polytrain_plugins.returned import prediction_problems_of
from polytrain_plugins.type_names import quoted

logger = logging.getLogger(__name__)

_OR_TRANSFORMED = "pass transformed=True with rows that are as the model was trained on"


def described(data: Any, *, columns: Sequence[str] | None = None, transform: Any = None) -> Source:
    """Describe the rows to predict.

    Raises:
        InvalidJobError: they can't be read.
    """
    try:
        return describe("data", data, columns=columns, transform=transform)
    except SourceError as error:
        problem = Problem(field="data", what=error.what, remedy=error.remedy)
        raise InvalidJobError((problem,)) from error


def device_problems(backend: Backend, *, use_gpu: Any, num_workers: Any) -> Iterator[Problem]:
    """Yield the problems of a request for GPUs."""
    if use_gpu and Device.GPU not in backend.capabilities.devices:
        yield Problem(
            field="use_gpu",
            what=f"the {backend.name} backend uses no GPUs",
            remedy="Leave it out",
        )
    elif use_gpu and num_workers == 0:
        yield Problem(
            field="use_gpu",
            what="there are no workers to get GPUs: num_workers=0 predicts in this process",
            remedy="Leave one of the two out; this process uses the devices that it sees",
        )


def column_name(given: Any) -> Iterator[Wrong]:
    """Yield the problems of this name for a column."""
    if not isinstance(given, str) or not given:
        yield f"{given!r} is not a name", 'Give a name, such as "prediction"'


def key_problems(
    keep: Any, columns: Sequence[str], *, prediction_column: Any, has_output: bool
) -> Iterator[Problem]:
    """Yield the problems of the key columns."""
    if not isinstance(keep, tuple):
        shown = [keep] if isinstance(keep, str) else list(columns[:1])
        yield Problem(
            field="keep",
            what=f"{quoted(keep)} is not a list of columns",
            remedy=f"Pass their names: keep={shown!r}",
        )
        return
    if keep and not has_output:
        yield Problem(
            field="keep",
            what="without an output the predictions are an array, which has no key columns",
            remedy='Pass output="…" too, or leave it out',
        )
    for number, name in enumerate(keep):
        if not isinstance(name, str):
            yield Problem(
                field="keep",
                what=f"{quoted(name)} is not the name of a column",
                remedy=f"Pass names, such as {columns[0]!r}",
            )
        elif name not in columns:
            yield Problem(
                field="keep",
                what=f"the data has no column {name!r}",
                remedy=column_remedy(name, columns),
            )
        elif name in keep[:number]:
            yield Problem(field="keep", what=f"{name!r} is there twice", remedy="Name it once")
        elif name == prediction_column:
            yield Problem(
                field="keep",
                what=f"the predictions' column is called {name!r} too",
                remedy='Name that one differently: prediction_column="…"',
            )


def column_problems(needed: Sequence[str] | None, columns: Sequence[str]) -> Iterator[Problem]:
    """Yield a problem if the data lacks columns that the model needs."""
    known = set(columns)
    for name in needed or ():
        if name not in known:
            yield Problem(
                field="data",
                what=f"it has no column {name!r}, which the model needs",
                remedy=column_remedy(name, columns),
            )


def option_problems(
    backend: Backend, options: Mapping[str, Any], source: Source, *, is_sent: bool
) -> Iterator[Problem]:
    """Yield the problems of the backend's options.

    Args:
        backend: the model's backend.
        options: the user's options.
        source: the rows to predict.
        is_sent: whether workers in other processes get the options.
    """
    columns = tuple(without_kept(source.schema.names))
    yield from prediction_problems_of(backend, options, replace(source.info, columns=columns))
    functions: dict[str, Callable[..., Any]] = {
        name: value for name, value in options.items() if callable(value)
    }
    for name, function in functions.items() if is_sent else ():
        yield from pickle_problems(name, function)


def output_problems(output: OutputFiles, now: PredictionRecord) -> Iterator[Problem]:
    """Yield the problems that keep predictions from being added to an output.

    Args:
        now: the record of the user's request.
    """
    place = output.location.address
    before = output.record()
    if before is not None:
        yield from record_problems(before, now, place=place)
    elif output.names():
        yield Problem(
            field="output",
            what=f"{place!r} has files that aren't predictions of this version of polytrain",
            remedy="Give an empty directory, or one that doesn't exist",
        )


_KEPT = "polytrain kept "
"""What precedes the name of a key column beside the one that a transform has made of it."""


def kept_as(name: str, columns: Collection[str]) -> str:
    """Return the name of a key column among the columns of the data."""
    return f"{_KEPT}{name}" if f"{_KEPT}{name}" in columns else name


def without_kept(columns: Iterable[str]) -> list[str]:
    """Return the names of the columns that aren't only kept."""
    return [name for name in columns if not name.startswith(_KEPT)]


@dataclass(frozen=True, kw_only=True)  # without slots: `code_in` looks for the user's function
class WithKeys:
    """A transform whose result also has the key columns, as they were."""

    transform: Callable[..., Any]
    keys: tuple[str, ...]

    def __call__(self, batch: Mapping[str, Any]) -> Any:
        # Copy the keys: a transform may change arrays in place.
        kept = {name: batch[name].copy() for name in self.keys if name in batch}
        result = self.transform(batch)
        if not isinstance(result, Mapping):
            return result
        beside = {f"{_KEPT}{name}" if name in result else name: kept[name] for name in kept}
        return {**beside, **result}


def with_keys(transform: Any, keys: Any) -> Any:
    """Return a transform whose result has the key columns; None without a transform."""
    if not callable(transform) or not keys or not isinstance(keys, tuple):
        return transform
    return WithKeys(transform=transform, keys=keys)


def transform_problems(
    manifest: Manifest | None, transform: Any, *, transformed: Any
) -> Iterator[Problem]:
    """Yield a problem if the model wouldn't get such rows as it was trained on.

    Args:
        manifest: manifest of the checkpoint; None if a user has made its directory.
        transform: the function that the user passed.
        transformed: whether the user says that the rows are already transformed.
    """
    trained_with = None if manifest is None else manifest.transform
    if transform is None:
        if trained_with is not None and not transformed:
            yield Problem(
                field="transform",
                what="the model was trained on rows that a function had changed, "
                "DataConfig(transform=…), and these rows would reach it as they are",
                remedy=f"Pass the same function here, transform=…, or {_OR_TRANSFORMED}",
            )
        return
    if transformed:
        yield Problem(
            field="transformed",
            what="it says that the rows need no transform, and there is one",
            remedy="Pass one of the two",
        )
    elif not callable(transform):
        yield Problem(
            field="transform", what=f"{transform!r} is not a function", remedy="Pass a function"
        )
    elif wants_generator(transform):
        yield Problem(
            field="transform",
            what="it changes rows at random, and so would the predictions be",
            remedy=f"Leave it out, and {_OR_TRANSFORMED}",
        )
    elif manifest is not None:
        yield from _of_another_code(manifest, transform)


def _of_another_code(manifest: Manifest, transform: Callable[..., Any]) -> Iterator[Problem]:
    if manifest.transform is None:
        yield Problem(
            field="transform",
            what="the model was trained without one",
            remedy="Leave it out, and pass rows with the columns of the training data",
        )
        return
    python = ".".join(manifest.versions.get("python", "").split(".")[:2])
    if python != python_version():
        logger.warning(
            "The model was trained with Python %s, and this is %s: whether the transform is the "
            "one of the training can't be checked.",
            python,
            python_version(),
        )
    elif manifest.transform != code_fingerprint(transform):
        yield Problem(
            field="transform",
            what="its code differs from that of the function that the model was trained with, or a "
            "value that it uses does",
            remedy=f"Pass that function, or {_OR_TRANSFORMED}",
        )
