"""Checks of the columns of data sets, by names and types.

Arrow is imported where there is a schema to look at, whose owner has imported it already.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from polytrain_plugins.backend import Job
from polytrain_plugins.close_names import did_you_mean
from polytrain_plugins.errors import Problem

if TYPE_CHECKING:
    import pyarrow as pa


_MOST_LISTED = 20


def column_remedy(name: str, columns: Sequence[str]) -> str:
    """Say which column a name that isn't there may mean, and which there are.

    Args:
        name: what the user gave.
        columns: the columns that there are.
    """
    shown = ", ".join(map(str, columns[:_MOST_LISTED])) or "none"
    more = f" and {len(columns) - _MOST_LISTED} more" if len(columns) > _MOST_LISTED else ""
    return f"{did_you_mean(name, columns)}Its columns: {shown}{more}"


def missing_columns(job: Job, **options: str | None) -> Iterator[Problem]:
    """Yield the columns that an option names and a data set lacks.

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
                    remedy=column_remedy(column, dataset.columns),
                )


def number_problems(
    job: Job, *, of_classes: Collection[str] = (), **options: str | None
) -> Iterator[Problem]:
    """Yield the columns that should hold numbers and have a different type.

    Args:
        job: whose data sets are looked at.
        of_classes: those of the options whose numbers may stand for classes.
        options: an option's name to the column that the user gave; None for none.
    """
    for option, column in options.items():
        for dataset in job.datasets.values():
            # A name that isn't a string is a separate problem.
            kind = dataset.type_of(column) if isinstance(column, str) else None
            if kind is not None and not is_number(kind):
                yield Problem(
                    field=option,
                    what=f"the column {column!r} of the data set {dataset.name!r} is {kind}, and "
                    "not a number",
                    remedy="Number the classes from 0, as pandas.factorize does"
                    if option in of_classes and is_category(kind)
                    else "Turn it into a number, or name another column",
                )


def is_number(kind: pa.DataType) -> bool:
    """Whether values of a type can be used as numbers; missing values become NaN."""
    import pyarrow.types as types

    if types.is_dictionary(kind):
        return is_number(kind.value_type)
    return bool(
        types.is_integer(kind)
        or types.is_floating(kind)
        or types.is_boolean(kind)
        or types.is_decimal(kind)
        or types.is_null(kind)
    )


def is_category(kind: pa.DataType) -> bool:
    """Whether values of a type are categories by themselves: strings, or numbers with a list."""
    import pyarrow.types as types

    if types.is_dictionary(kind):
        return is_category(kind.value_type) or is_number(kind.value_type)
    return bool(types.is_string(kind) or types.is_large_string(kind))
