"""Problems that many backends look for."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import MISSING, fields
from difflib import get_close_matches
from typing import Any

from polytrain_plugins.backend import Job
from polytrain_plugins.errors import Problem


def not_column_names(**options: Any) -> Iterator[Problem]:
    """Options that name a column each, and hold something else.

    Args:
        options: an option's name to what the user gave; None for none.
    """
    for option, value in options.items():
        if value is None or isinstance(value, str):
            continue
        if isinstance(value, list | tuple) and all(isinstance(each, str) for each in value):
            yield Problem(
                field=option,
                what=f"{value!r} are several columns, and it is one",
                remedy="Name one column. For several labels train a model for each, or use a "
                "training function",
            )
        else:
            yield Problem(
                field=option,
                what=f"it is {value!r}, of the type {type(value).__name__}",
                remedy="Give the name of a column",
            )


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


def categorical_problems(job: Job, categorical: Any, others: Iterable[str]) -> Iterator[Problem]:
    """What is wrong with the option `categorical`, a list of features.

    Args:
        job: whose data sets are looked at.
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
                what=f"{column!r} is no feature",
                remedy="Leave it out of the list",
            )


def sample_problems(**options: Any) -> Iterator[Problem]:
    """Options that are not a number of rows to make bins from."""
    for option, rows in options.items():
        if not isinstance(rows, int) or isinstance(rows, bool) or rows < 1:
            yield Problem(
                field=option,
                what=f"{rows!r} is not a number of rows",
                remedy="Give 1 or more; 200,000 is enough for 256 bins",
            )


def refused_parameters(
    params: Mapping[str, Any], refused: Iterable[tuple[Iterable[str], str, str]]
) -> Iterator[Problem]:
    """Parameters of a framework that are the run's to decide.

    Args:
        params: the user's.
        refused: under which names, what it is, and what to do instead.
    """
    for names, meaning, remedy in refused:
        for name in names:
            if name in params:
                yield Problem(field=f"params[{name!r}]", what=f"it is {meaning}", remedy=remedy)


def unknown_name(field: str, name: str, known: Iterable[str], whose: str) -> Iterator[Problem]:
    """A name that is none of a framework's.

    Args:
        field: the argument, as the user writes it.
        name: what the user gave.
        known: those that there are.
        whose: the framework's.
    """
    names = sorted(known)
    if name not in names:
        near = get_close_matches(name, names, n=3)
        meant = f"Did you mean {' or '.join(map(repr, near))}? " if near else ""
        yield Problem(
            field=field,
            what=f"{name!r} is none of {whose}",
            remedy=f"{meant}There are: {', '.join(names)}",
        )


def misspelt_parameters(
    params: Mapping[str, Any], known: Collection[str], whose: str
) -> Iterator[Problem]:
    """Parameters that are none of a framework's but nearly are.

    Others may be a newer version's, or an own objective's: the framework itself warns of those that
    it doesn't use.

    Args:
        params: the framework's parameters, as the user gave them.
        known: the names of those that there are.
        whose: the framework's.
    """
    for name in params:
        near = () if name in known else get_close_matches(str(name), known, n=1, cutoff=0.8)
        if near:
            yield Problem(
                field=f"params[{name!r}]",
                what=f"it is none of {whose}, which would ignore it",
                remedy=f"Did you mean {near[0]!r}?",
            )


def needed_by_objective(objective: str, field: str, remedy: str) -> Problem:
    """Something that an objective can't do without.

    Args:
        objective: its name.
        field: the argument that is missing, as the user writes it.
        remedy: what to pass.
    """
    return Problem(field=field, what=f"the objective {objective!r} needs it", remedy=remedy)


def not_numbers(
    params: Mapping[str, Any], *, whole: Iterable[str] = (), real: Iterable[str] = ()
) -> Iterator[Problem]:
    """Parameters of a framework that aren't the numbers that it takes.

    Args:
        params: the user's.
        whole: those that have to be whole numbers.
        real: those that may be any number.
    """
    for names, kind, what in ((whole, int, "a whole number"), (real, float, "a number")):
        for name in names:
            if params.get(name) is None:
                continue
            # As frameworks do, which are given all parameters as text.
            try:
                kind(str(params[name]))
            except ValueError:
                yield Problem(
                    field=f"params[{name!r}]",
                    what=f"{params[name]!r} is not {what}",
                    remedy=f"Give {what}, or leave it out",
                )


def model_problems(of: str, **options: Any) -> Iterator[Problem]:
    """Options that are no model to resume from: neither a booster nor the path of one's file.

    Args:
        of: the module whose `Booster` it has to be.
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
                what=f"{type(model).__name__} is no model to go on from",
                remedy=f"Pass the {of}.Booster, or the path of its file",
            )


def is_instance_of(value: Any, package: str, name: str) -> bool:
    """Whether a value is of a package's class, or of one that is derived from it; without importing
    the package."""
    classes = ((cls.__module__.partition(".")[0], cls.__name__) for cls in type(value).__mro__)
    return (package, name) in classes


def too_many_threads(
    params: Mapping[str, Any], names: Iterable[str], job: Job
) -> Iterator[Problem]:
    """A number of threads above the CPUs of a worker.

    Args:
        params: the user's.
        names: under which of the framework's it may be.
        job: whose workers these are.
    """
    for name in names:
        threads = params.get(name)
        if isinstance(threads, int) and threads > job.cpus_per_worker:
            yield Problem(
                field=f"params[{name!r}]",
                what=f"{threads} threads are more than a worker's {job.cpus_per_worker} CPU(s)",
                remedy="Leave it out; ScalingConfig(resources_per_worker={'CPU': …}) says it",
            )
