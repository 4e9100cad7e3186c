"""Rules of the options that boosters share."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from polytrain.config.constraints import Checked, Wrong
from polytrain_plugins import Job, Problem, is_instance_of, missing_columns
from polytrain_plugins.close_names import did_you_mean_file
from polytrain_plugins.type_names import a_type, quoted


def _one_column(given: Any) -> Iterator[Wrong]:
    """Yield the reason if this doesn't name exactly one column."""
    if isinstance(given, list | tuple) and all(isinstance(each, str) for each in given):
        yield (
            f"{quoted(given)} names several columns, and the option takes one",
            "Name one column. For several labels train a model for each, or use a "
            "training function",
        )
    elif not isinstance(given, str):
        yield (
            f"{quoted(given)} is not the name of a column",
            "Give the name of a column",
        )


def _a_dict(given: Any) -> Iterator[Wrong]:
    """Yield the reason if this can't be `params`."""
    if not isinstance(given, Mapping):
        yield f"{quoted(given)} is not a dict", "Pass params={…}"


COLUMN = Checked(_one_column)
PARAMS = Checked(_a_dict)


def patience_problems(job: Job, rounds: int | None) -> Iterator[Problem]:
    """Yield a problem if `early_stopping_rounds` is set and there is no evaluation set."""
    if rounds is not None and set(job.datasets) <= {"train"}:
        yield Problem(
            field="early_stopping_rounds",
            what="there is no data set to evaluate on",
            remedy='Pass one more: datasets={"train": …, "valid": …}',
        )


def categorical_problems(job: Job, categorical: Any, others: Iterable[str]) -> Iterator[Problem]:
    """Yield the problems of the option `categorical`, a list of features.

    Args:
        job: the job whose data sets are checked.
        categorical: the user's value.
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


def model_problems(of: str, **options: Any) -> Iterator[Problem]:
    """Yield a problem for each option that isn't a booster or the path of a booster's file.

    Args:
        of: the module of the class `Booster`.
        options: option name → the user's value; None if it isn't set.
    """
    for option, model in options.items():
        if isinstance(model, str | os.PathLike):
            if not os.path.isfile(model):
                yield Problem(
                    field=option,
                    what=f"there is no file {os.fspath(model)!r}",
                    remedy=f"{did_you_mean_file(Path(model))}Give the path of a model's file, or "
                    f"the {of}.Booster itself",
                )
        elif model is not None and not is_instance_of(model, of, "Booster"):
            yield Problem(
                field=option,
                what=f"{a_type(model)} isn't a model to continue",
                remedy=f"Pass the {of}.Booster, or the path of its file",
            )
