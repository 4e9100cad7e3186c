"""Checks of the options that boosters share, one function for each."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from polytrain_plugins import Job, Problem, is_instance_of, missing_columns


def not_column_names(**options: Any) -> Iterator[Problem]:
    """Yield the options that don't name one column.

    Args:
        options: an option's name to what the user gave; None for none.
    """
    for option, value in options.items():
        if value is None or isinstance(value, str):
            continue
        if isinstance(value, list | tuple) and all(isinstance(each, str) for each in value):
            yield Problem(
                field=option,
                what=f"{value!r} names several columns, and the option takes one",
                remedy="Name one column. For several labels train a model for each, or use a "
                "training function",
            )
        else:
            yield Problem(
                field=option,
                what=f"{value!r} is a {type(value).__name__}, not the name of a column",
                remedy="Give the name of a column",
            )


def not_a_count(**options: Any) -> Iterator[Problem]:
    """Yield the options that aren't a whole number of at least 1."""
    for option, value in options.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            yield Problem(
                field=option, what=f"{value!r} is not a number of rounds", remedy="Give 1 or more"
            )


def not_a_mapping(**options: Any) -> Iterator[Problem]:
    """Yield the options that aren't a dict."""
    for option, value in options.items():
        if not isinstance(value, Mapping):
            yield Problem(
                field=option, what=f"{value!r} is not a dict", remedy=f"Pass {option}={{…}}"
            )


def patience_problems(job: Job, **options: Any) -> Iterator[Problem]:
    """Yield what is wrong with options for early stopping; None turns an option off.

    Each must be a number of rounds, and there must be a data set besides "train" to evaluate.
    """
    for option, rounds in options.items():
        if rounds is None:
            continue
        yield from not_a_count(**{option: rounds})
        if set(job.datasets) <= {"train"}:
            yield Problem(
                field=option,
                what="there is no data set to evaluate on",
                remedy='Pass one more: datasets={"train": …, "valid": …}',
            )


def categorical_problems(job: Job, categorical: Any, others: Iterable[str]) -> Iterator[Problem]:
    """Yield what is wrong with the option `categorical`, a list of features.

    Args:
        job: the job whose data sets are checked.
        categorical: what the user gave.
        others: columns that aren't features.
    """
    if isinstance(categorical, str):
        yield Problem(
            field="categorical",
            what=f"{categorical!r} is not a list of columns",
            remedy=f"Pass [{categorical!r}]",
        )
        return
    for column in categorical:
        yield from missing_columns(job, categorical=column)
        if column in others:
            yield Problem(
                field="categorical",
                what=f"{column!r} isn't a feature",
                remedy="Remove it from the list",
            )


def sample_problems(**options: Any) -> Iterator[Problem]:
    """Yield the options that aren't a number of rows."""
    for option, rows in options.items():
        if not isinstance(rows, int) or isinstance(rows, bool) or rows < 1:
            yield Problem(
                field=option,
                what=f"{rows!r} is not a number of rows",
                remedy="Give 1 or more; 200,000 is enough for 256 bins",
            )


def model_problems(of: str, **options: Any) -> Iterator[Problem]:
    """Yield the options that aren't a booster or the path of a booster's file.

    Args:
        of: the module of the class `Booster`.
        options: an option's name to what the user gave; None for none.
    """
    for option, model in options.items():
        if isinstance(model, str | os.PathLike):
            if not os.path.isfile(model):
                yield Problem(
                    field=option,
                    what=f"there is no file {os.fspath(model)!r}",
                    remedy=f"Give the path of a model's file, or the {of}.Booster itself",
                )
        elif model is not None and not is_instance_of(model, of, "Booster"):
            yield Problem(
                field=option,
                what=f"a {type(model).__name__} isn't a model to continue",
                remedy=f"Pass the {of}.Booster, or the path of its file",
            )
