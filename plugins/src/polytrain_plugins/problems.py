"""Problems that backends of any framework look for, in options and in the columns of data sets.

Arrow is imported where there is a schema to look at, whose owner has imported it already.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any

from polytrain_plugins.backend import Job
from polytrain_plugins.close_names import did_you_mean
from polytrain_plugins.errors import Problem
from polytrain_plugins.type_names import quoted

if TYPE_CHECKING:
    import pyarrow as pa

_MOST_LISTED = 20

MOST_SECONDS = 1e9
"""About 30 years, as a limit of timeouts. Clocks and frameworks overflow at a few hundred years."""


def options_beside_function(backend: Any, names: Iterable[str]) -> Iterator[Problem]:
    """Yield the options of declarative training that are set beside a training function.

    Args:
        backend: the backend, a dataclass.
        names: its options that only declarative training uses.
    """
    for option in fields(backend):
        default = (
            option.default_factory() if option.default_factory is not MISSING else option.default
        )
        if option.name in names and not _is_same(getattr(backend, option.name), default):
            yield Problem(
                field=option.name,
                what="it is for training without a training function, and there is one",
                remedy="Use it inside the function, or leave the function out",
            )


def _is_same(value: Any, default: Any) -> bool:
    try:
        return value is default or bool(value == default)
    except ValueError:  # an array or a frame, compared element by element
        return False


def needed_without_function(backend: Any, **remedies: str) -> Iterator[Problem]:
    """Options that declarative training can't do without, and that are None.

    Args:
        backend: whose options these are.
        remedies: an option's name to what to do.
    """
    for option, remedy in remedies.items():
        if getattr(backend, option) is None:
            yield Problem(field=option, what="it is required", remedy=remedy)


def timeout_problems(**options: Any) -> Iterator[Problem]:
    """Yield the options that aren't a number of seconds above 0, or are longer than any run.

    Args:
        options: an option's name to what the user gave.
    """
    for option, value in options.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value <= MOST_SECONDS:
            yield Problem(
                field=option,
                what=f"{quoted(value)} is not a number of seconds",
                remedy=f"Give a number of seconds above 0 and at most {MOST_SECONDS:g}",
            )


def unknown_name(field: str, name: str, known: Iterable[str], whose: str) -> Iterator[Problem]:
    """Yield a problem if a framework doesn't know a name.

    Args:
        field: the argument, as the user writes it.
        name: what the user gave.
        known: the names that the framework knows.
        whose: what these names are, for the message.
    """
    names = sorted(known)
    if name not in names:
        yield Problem(
            field=field,
            what=f"{name!r} isn't one of {whose}",
            remedy=f"{did_you_mean(name, names)}There are: {', '.join(names)}",
        )


def is_instance_of(value: Any, package: str, name: str) -> bool:
    """Whether a value is an instance of a package's class, without importing the package."""
    classes = ((cls.__module__.partition(".")[0], cls.__name__) for cls in type(value).__mro__)
    return (package, name) in classes


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
