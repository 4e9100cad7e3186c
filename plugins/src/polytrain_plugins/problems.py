"""Problems that many backends look for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, fields
from typing import Any

from polytrain_plugins.backend import Job
from polytrain_plugins.errors import Problem


def missing_columns(job: Job, **options: str | None) -> Iterator[Problem]:
    """Columns that an option names and a data set hasn't.

    Args:
        job: whose data sets are looked at.
        options: an option's name to the column that the user gave; None for none.
    """
    for option, column in options.items():
        for dataset in job.datasets.values():
            if column is not None and dataset.lacks(column):
                yield Problem(
                    field=option,
                    what=f"the data set {dataset.name!r} has no column {column!r}",
                    remedy=f"Its columns: {', '.join(dataset.columns)}",
                )


def options_beside_function(backend: Any, names: Iterable[str]) -> Iterator[Problem]:
    """Options of declarative training that were set although there is a training function.

    Args:
        backend: the backend, a dataclass.
        names: its options that only declarative training uses.
    """
    for option in fields(backend):
        default = (
            option.default_factory() if option.default_factory is not MISSING else option.default
        )
        if option.name in names and getattr(backend, option.name) != default:
            yield Problem(
                field=option.name,
                what="it is for training without a training function, and one was passed",
                remedy="Use it inside the function, or leave the function out",
            )


def not_a_count(**options: Any) -> Iterator[Problem]:
    """Options that are not a whole number of at least 1."""
    for option, value in options.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            yield Problem(
                field=option, what=f"{value!r} is not a number of rounds", remedy="Give 1 or more"
            )


def not_a_mapping(**options: Any) -> Iterator[Problem]:
    """Options that are not a dict of names to values."""
    for option, value in options.items():
        if not isinstance(value, Mapping):
            yield Problem(
                field=option, what=f"{value!r} is not a dict", remedy=f"Pass {option}={{…}}"
            )


def missing_label(label: str | None) -> Iterator[Problem]:
    """The option `label`, where it has to name the column to predict and doesn't."""
    if label is None:
        yield Problem(field="label", what="it is required", remedy="Name the column to predict")


def patience_problems(job: Job, **options: Any) -> Iterator[Problem]:
    """Options that say for how many rounds early stopping waits; None for those not in use.

    Each has to be a number of rounds, and there has to be a data set besides "train" to look at.
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
