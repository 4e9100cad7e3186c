"""Problems that many backends look for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
