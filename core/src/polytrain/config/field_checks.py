"""Rules of single fields that neither a type nor a range can state."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from polytrain.config.constraints import Wrong, wrong_type
from polytrain.text.plain_values import is_whole
from polytrain_plugins.type_names import a_type, quoted

_NAME_BYTES = 255
"""Length of a file's name that every usual file system takes."""

_SHOWN = 80
"""Characters of a wrong value that tell the user which one it is."""

_RAYS = ("CPU", "GPU", "TPU", "HPU", "NPU", "neuron_cores", "memory")
"""Resources that Ray has by itself; others have the names that the cluster's owner gives them."""

_FOLDED = {name.casefold().replace("_", "").rstrip("s"): name for name in _RAYS}


def worker_count(count: Any) -> Iterator[Wrong]:
    """Yield what is wrong with a number of workers, or with the least and the most."""
    if isinstance(count, tuple | list):
        least, most = count if len(count) == 2 else (0, 0)
        is_pair = isinstance(count, tuple) and is_whole(least) and is_whole(most)
        if not is_pair or not 1 <= least <= most:
            yield (
                f"{quoted(count)} is not a pair of the least and the most workers",
                "Give two numbers, the smaller first, for example (2, 8)",
            )
    elif not is_whole(count) or count < 0:
        yield (
            f"{quoted(count)} is not a number of workers",
            "Give a whole number: 1 or more, or 0 to train in this process; or the least "
            "and the most, for example (2, 8)",
        )


def resource_amounts(given: Mapping[Any, Any]) -> Iterator[Wrong]:
    """Yield what is wrong with the resources of a worker."""
    for name, amount in given.items():
        if not isinstance(amount, int | float) or amount < 0:
            yield (
                f"{quoted(amount)} is not an amount of {name!r}",
                'Give a number, 0 or more, for example {"CPU": 2}',
            )
        meant = _FOLDED.get(str(name).casefold().replace("_", "").rstrip("s"))
        if meant is not None and name != meant:
            yield f"Ray has no resource {name!r}", f"Write {meant!r}"


def node_labels(given: Any) -> Iterator[Wrong]:
    """Yield what is wrong with a label selector, or with a list of them."""
    selectors = [given] if isinstance(given, Mapping) else given
    if not isinstance(selectors, list | tuple):
        yield f"it is {a_type(given)}", "Pass a dict"
        return
    for selector in selectors:
        if not isinstance(selector, Mapping) or not all(
            isinstance(text, str) and text for pair in selector.items() for text in pair
        ):
            yield (
                f"{selector!r} doesn't map names of labels to values, as strings",
                'Give a dict, for example {"ray.io/market-type": "spot"}',
            )


def directory_name(name: Any) -> Iterator[Wrong]:
    """Yield why a run's name can't be that of its directory."""
    remedy = None
    if not isinstance(name, str) or name in ("", ".", ".."):
        remedy = 'Give a name, for example "baseline"'
    elif name != Path(name).name:
        remedy = "Give a name without slashes"
    elif not name.isprintable():
        remedy = "Give a name without control characters"
    elif len(os.fsencode(name)) > _NAME_BYTES:
        remedy = f"Give a name of at most {_NAME_BYTES} bytes"
    if remedy is not None:
        text = repr(name)
        shown = text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]}…{text[-_SHOWN // 4 :]}"
        yield f"{shown} can't name a directory", remedy


def path_or_address(given: Any) -> Iterator[Wrong]:
    """Yield why this can't be a path or an address, wherever it would lead."""
    if not isinstance(given, str | Path):
        problem = wrong_type("", given, str)
        yield problem.what, problem.remedy
    elif "\0" in str(given):
        yield (
            f"{str(given)!r} holds a NUL character, which no file's path can",
            "Give a path or an address without it",
        )


def metric_name(name: Any) -> Iterator[Wrong]:
    """Yield why a metric can't have this name."""
    if not isinstance(name, str) or name == "":
        yield (
            f"{quoted(name)} is not the name of a metric",
            'Give the name of a reported metric, for example "loss", or None',
        )


def column_names(names: Any) -> Iterator[Wrong]:
    """Yield why this isn't a list of columns."""
    if isinstance(names, str):
        yield f"{names!r} is one name", f"Give a list: [{names!r}]"
    elif not isinstance(names, Iterable):
        yield f"it is {a_type(names)}", "Pass a list"


def json_arguments(arguments: Mapping[Any, Any]) -> Iterator[Wrong]:
    """Yield the arguments that can't be written down by name, in JSON."""
    for name, value in arguments.items():
        if not isinstance(name, str) or not _is_json(value):
            yield (
                f"{name!r}: {value!r} can't be written down in JSON, for a run that is resumed",
                "Pass numbers, texts, lists or dicts of them by name; make anything else "
                "in the validation function",
            )


def _is_json(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value)) == value) or value != value
    except (TypeError, ValueError):
        return False


def task_options(options: Mapping[str, Any]) -> Iterator[Wrong]:
    """Yield what `ray.remote` of a validation can't be given."""
    if "num_returns" in options:
        yield (
            "a validation returns its metrics alone, so num_returns can't be chosen",
            "Leave num_returns out",
        )
