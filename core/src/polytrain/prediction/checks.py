"""Finds all problems of a request for predictions before anything starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from polytrain.config.constraints import Wrong
from polytrain.data.read.describe import Source, describe
from polytrain.data_errors import SourceError
from polytrain.functions.function_checks import pickle_problems
from polytrain.prediction.output_files import OutputFiles
from polytrain.prediction.record import PredictionRecord, record_problems
from polytrain_plugins import Backend, Device, InvalidJobError, Problem, column_remedy


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


def truth_value(given: Any) -> Iterator[Wrong]:
    """Yield the problem if this is neither True nor False."""
    if not isinstance(given, int) or given not in (0, 1):
        yield f"{given!r} is neither True nor False", "Give one of them"


def column_name(given: Any) -> Iterator[Wrong]:
    """Yield the problems of this name for a column."""
    if not isinstance(given, str) or not given:
        yield f"{given!r} is not a name", 'Give a name, such as "prediction"'


def key_problems(
    keep: Any, columns: Sequence[str], *, prediction_column: Any, has_output: bool
) -> Iterator[Problem]:
    """Yield the problems of the key columns."""
    if isinstance(keep, str) or not all(isinstance(name, str) for name in keep):
        shown = [keep] if isinstance(keep, str) else list(columns[:1])
        yield Problem(
            field="keep",
            what=f"{keep!r} is not a list of columns",
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
        if name not in columns:
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
    yield from backend.prediction_problems(options, source.info)
    functions: dict[str, Callable[..., Any]] = {
        name: value for name, value in options.items() if callable(value)
    }
    for name, function in functions.items() if is_sent else ():
        yield from pickle_problems(name, function)


def output_problems(output: OutputFiles, now: PredictionRecord) -> Iterator[Problem]:
    """Yield the problems that keep predictions from being added to an output.

    Args:
        output: the output.
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
