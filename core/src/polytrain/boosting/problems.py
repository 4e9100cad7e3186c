"""What is wrong with the options that boosters share, with parameters and with features.

Parameters are checked without importing the framework, features by their names and types.

Arrow is imported only where there is a schema: then it is imported already.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polytrain.config.constraints import Checked, Wrong
from polytrain.text.described import first_few, numbered
from polytrain_plugins import (
    DatasetInfo,
    Job,
    Problem,
    is_category,
    is_instance_of,
    is_number,
    missing_columns,
)
from polytrain_plugins.close_names import ALMOST_THE_SAME, did_you_mean, did_you_mean_file
from polytrain_plugins.type_names import a_type, quoted

if TYPE_CHECKING:
    import pyarrow as pa


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


def _a_list(given: Any) -> Iterator[Wrong]:
    """Yield the reason if this can't be `callbacks`."""
    if not isinstance(given, Sequence):
        yield f"{quoted(given)} is not a list", "Pass callbacks=[…]"


COLUMN = Checked(_one_column)
PARAMS = Checked(_a_dict)
CALLBACKS = Checked(_a_list)


def patience_problems(job: Job, rounds: int | None) -> Iterator[Problem]:
    """Yield a problem if `early_stopping_rounds` is set and there is no evaluation set."""
    if rounds is not None and set(job.datasets) <= {"train"}:
        yield Problem(
            field="early_stopping_rounds",
            what="there is no data set to evaluate on",
            remedy='Pass one more: datasets={"train": …, "valid": …}',
        )


def categorical_problems(
    job: Job, categorical: Iterable[str], others: Iterable[str]
) -> Iterator[Problem]:
    """Yield the problems of the columns that the option `categorical` names."""
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


_SHOWN = 8
"""Maximum number of columns in a message."""


def feature_problems(
    job: Job, others: Iterable[str], *, categorical: Collection[str], forbidden: str
) -> Iterator[Problem]:
    """Yield features that can't be used, or that differ between data sets.

    Args:
        others: columns that aren't features.
        forbidden: characters that the framework doesn't allow in a feature's name.
    """
    train, others = job.datasets.get("train"), set(others)
    for dataset in job.datasets.values():
        field = f"datasets[{dataset.name!r}]"
        features = [name for name in dataset.columns if name not in others]
        if dataset.columns and not features:
            yield Problem(
                field=field,
                what=f"it has no features, only {listed(dataset.columns)}",
                remedy="Add feature columns",
            )
        if unusable := [name for name in features if not _is_feature(dataset.type_of(name))]:
            yield Problem(
                field=field,
                what="these features aren't numbers, strings or categories: "
                + listed([f"{name!r} ({dataset.type_of(name)})" for name in unusable], plain=True),
                remedy="Turn such columns into numbers, or choose others: "
                f"dataset_config={{{dataset.name!r}: DataConfig(columns=[…])}}",
            )
        if train is None or not train.columns or dataset is train or not dataset.columns:
            continue
        expected = [name for name in train.columns if name not in others]
        yield from _different(field, expected, features)
        for name in expected:
            yield from _of_another_kind(field, name, train, dataset, name in categorical)
    if train is not None:
        yield from _name_problems(train, others, forbidden)


def constraint_problems(
    job: Job, others: Iterable[str], params: Mapping[str, Any], *names: str
) -> Iterator[Problem]:
    """Yield parameters that don't match the features of the data set "train".

    Args:
        names: parameters whose value is a list with an entry for each feature, a dict by feature,
            or a list of lists of features.
    """
    train, besides = job.datasets.get("train"), set(others)
    if train is None or not train.columns:
        return
    features = [column for column in train.columns if column not in besides]
    for name in names:
        value = params.get(name)
        entries = value if isinstance(value, list | tuple | Mapping) else ()
        nested = [entry for entry in entries if isinstance(entry, list | tuple | set)]
        # An empty list is as good as none.
        is_flat = isinstance(value, list | tuple) and not nested
        if is_flat and len(entries) not in (0, len(features)):
            yield Problem(
                field=f"params[{name!r}]",
                what=f"it has {len(entries)} entries for {len(features)} features",
                remedy=f"Give one entry for each feature, in this order: {listed(features)}",
            )
        named = value if isinstance(value, Mapping) else [each for some in nested for each in some]
        unknown = [entry for entry in named if entry not in features]
        if unknown:
            yield Problem(
                field=f"params[{name!r}]",
                what=f"{listed(unknown)} isn't a feature",
                remedy=f"The features are: {listed(features)}",
            )


def _is_feature(kind: pa.DataType | None) -> bool:
    return kind is None or is_number(kind) or is_category(kind)


def _different(field: str, expected: Sequence[str], features: Sequence[str]) -> Iterator[Problem]:
    theirs, ours = set(expected), set(features)
    if missing := [name for name in expected if name not in ours]:
        yield Problem(
            field=field,
            what=f"it lacks {listed(missing)}, which 'train' has",
            remedy="Give it the columns of 'train', in any order",
        )
    if extra := [name for name in features if name not in theirs]:
        yield Problem(
            field=field,
            what=f"it has {listed(extra)}, which 'train' lacks",
            remedy="Give both the same columns, as with dataset_config={'train': "
            "DataConfig(columns=[…]), …}",
        )


def _of_another_kind(
    field: str, name: str, train: DatasetInfo, dataset: DatasetInfo, categorical: bool
) -> Iterator[Problem]:
    """Yield a problem if a column has numbers in one data set and categories in the other."""
    one, other = train.type_of(name), dataset.type_of(name)
    if one is None or other is None or not (_is_feature(one) and _is_feature(other)):
        return
    if str(other) == "null":
        # The column has only missing values, which fit any type.
        return
    if _holds_numbers(one) != _holds_numbers(other) or (
        is_category(one) != is_category(other) and not categorical
    ):
        yield Problem(
            field=field,
            what=f"the column {name!r} is {other}, and {one} in 'train'",
            remedy="Give it the same type in both",
        )


def _holds_numbers(kind: pa.DataType) -> bool:
    import pyarrow.types as types

    return is_number(kind.value_type if types.is_dictionary(kind) else kind)


def _name_problems(
    train: DatasetInfo, others: Collection[str], forbidden: str
) -> Iterator[Problem]:
    wrong = [
        name
        for name in train.columns
        if name not in others and any(each in name for each in forbidden)
    ]
    if wrong:
        yield Problem(
            field="datasets['train']",
            what=f"the name(s) of the feature(s) {listed(wrong)} must not contain "
            f"{' '.join(map(repr, forbidden))}",
            remedy="Rename the column(s) in all data sets",
        )


def listed(names: Sequence[str], *, plain: bool = False) -> str:
    """Return the first few names, quoted unless they are `plain`."""
    return first_few(names if plain else list(map(repr, names)), _SHOWN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """The numbers that a parameter may be.

    Where it uses the parameter, the framework itself refuses others, in workers.
    """

    above: float | None = None
    least: float | None = None
    most: float | None = None
    below: float | None = None

    def __str__(self) -> str:
        bounds = (
            "" if self.above is None else f"above {self.above:g}",
            "" if self.least is None else f"at least {self.least:g}",
            "" if self.most is None else f"at most {_exact(self.most)}",
            "" if self.below is None else f"below {self.below:g}",
        )
        return " and ".join(filter(None, bounds))

    def __contains__(self, number: float) -> bool:
        # NaN is in no range.
        return (
            number == number
            and (self.above is None or number > self.above)
            and (self.least is None or number >= self.least)
            and (self.most is None or number <= self.most)
            and (self.below is None or number < self.below)
        )

    def problems(self, name: str, value: Any) -> Iterator[Problem]:
        """Yield a problem if a parameter has a number out of this range; lists are of numbers."""
        for each in value if isinstance(value, list | tuple) else (value,):
            with contextlib.suppress(TypeError, ValueError):
                # Frameworks read all parameters from text.
                if float(str(each)) not in self:
                    yield parameter_problem(
                        name,
                        f"it must be {self}; got {value!r}",
                        f"Give a number {self}, or leave it out",
                    )
                    return


def is_at_least(value: Any, least: int) -> bool:
    """Return whether a parameter is a number of at least this, also as text."""
    try:
        return int(value) >= least
    except (TypeError, ValueError):
        return False


def _exact(number: float) -> str:
    return f"{int(number):,}" if number == int(number) else f"{number:g}"


NOT_NEGATIVE = Range(least=0)
POSITIVE = Range(above=0)
SHARE = Range(least=0, most=1)
POSITIVE_SHARE = Range(above=0, most=1)
COUNT = Range(least=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """The names of a framework's parameters, aliases included, and the rules for some of them."""

    framework: str
    """The framework's name, as users know it."""

    known: Collection[str]
    of_the_run: Sequence[tuple[Collection[str], str, str]]
    """Parameters that the run sets: names, meaning and remedy of each."""

    other_framework: str
    translated: Mapping[str, str]
    """The other framework's parameter → this framework's equivalent."""

    whole: Collection[str]
    """Parameters that must be whole numbers."""

    real: Collection[str]
    """Parameters that may be any number."""

    ranges: Mapping[str, Range]
    """Parameters that may be only some numbers."""

    threads: Collection[str]
    """Parameters that set the number of threads."""

    switches: Collection[str] = ()
    """Parameters that must be true or false."""

    switch_texts: Sequence[str] = ("true", "false")
    """What the framework reads as true or false, in lower case."""

    @property
    def names(self) -> set[str]:
        """All names that `problems` handles."""
        of_the_run = (name for names, _, _ in self.of_the_run for name in names)
        return {*self.known, *self.translated, *of_the_run}

    def problems(self, params: Mapping[str, Any], job: Job) -> Iterator[Problem]:
        """Yield the problems of the user's parameters."""
        yield from self._refused(params)
        yield from self._misspelt(params)
        for name, ours in self.translated.items():
            if name in params:
                yield parameter_problem(
                    name,
                    f"it is a parameter of {self.other_framework}",
                    f"Use {self.framework}'s {ours!r}",
                )
        of_the_run = {name for names, _, _ in self.of_the_run for name in names}
        params = {name: value for name, value in params.items() if name not in of_the_run}
        yield from _not_numbers(params, self.whole, int, "a whole number")
        yield from _not_numbers(params, self.real, float, "a number")
        for name, value in params.items():
            if name in self.ranges:
                yield from self.ranges[name].problems(name, value)
            if name in self.switches and str(value).lower() not in self.switch_texts:
                yield parameter_problem(
                    name,
                    f"it must be True or False; got {value!r}",
                    "Give one of these, or leave it out",
                )
        yield from self._too_many_threads(params, job)

    def _refused(self, params: Mapping[str, Any]) -> Iterator[Problem]:
        for names, meaning, remedy in self.of_the_run:
            for name in names:
                if name in params:
                    yield parameter_problem(name, f"it is {meaning}", remedy)

    def _misspelt(self, params: Mapping[str, Any]) -> Iterator[Problem]:
        """Yield unknown parameters whose names are close to a known one.

        Other unknown names may belong to a newer version or to the user's objective. The framework
        itself warns of parameters that it doesn't use.
        """
        known = self.names
        for name in params:
            meant = did_you_mean(name, known, cutoff=ALMOST_THE_SAME)
            if meant and name not in known:
                yield parameter_problem(
                    name,
                    f"{self.framework} has no parameter of this name, and would ignore it",
                    meant.strip(),
                )

    def _too_many_threads(self, params: Mapping[str, Any], job: Job) -> Iterator[Problem]:
        for name in self.threads:
            threads = params.get(name)
            if isinstance(threads, int) and threads > job.cpus_per_worker:
                cpus = numbered(job.cpus_per_worker, "CPU")
                yield parameter_problem(
                    name,
                    f"{threads} threads are more than a worker's {cpus}",
                    "Leave it out; ScalingConfig(resources_per_worker={'CPU': …}) sets it",
                )


def parameter_problem(name: str, what: str, remedy: str) -> Problem:
    """Return the problem of a parameter."""
    return Problem(field=f"params[{name!r}]", what=what, remedy=remedy)


def score_problems(option: str, column: str | None, *, has_several: bool) -> Iterator[Problem]:
    """Yield a problem if rows have several scores, and a column has the initial one.

    Args:
        option: the option that names the column.
        column: its value.
        has_several: whether the model has several scores for each row, as for classes.
    """
    if column is not None and has_several:
        yield Problem(
            field=option,
            what=f"the column {column!r} has one initial score for each row, and the objective "
            "needs several",
            remedy="Leave it out, or use a training function",
        )


def needed_by_objective(objective: str, field: str, remedy: str) -> Problem:
    """Return the problem of a missing argument that an objective needs."""
    return Problem(field=field, what=f"the objective {objective!r} needs it", remedy=remedy)


def _not_numbers(
    params: Mapping[str, Any], names: Iterable[str], kind: type[int] | type[float], what: str
) -> Iterator[Problem]:
    for name in names:
        if params.get(name) is None:
            continue
        # Frameworks read all parameters from text.
        try:
            kind(str(params[name]))
        except ValueError:
            yield parameter_problem(
                name, f"{params[name]!r} is not {what}", f"Give {what}, or leave it out"
            )
