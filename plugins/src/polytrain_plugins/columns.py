"""Problems with the columns of data sets, as far as names and types tell them.

For backends that train on tables of numbers and categories. Arrow is imported where there is a
schema to look at, whose owner has imported it already.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from polytrain_plugins.backend import Job
from polytrain_plugins.errors import Problem
from polytrain_plugins.shard import DatasetInfo

if TYPE_CHECKING:
    import pyarrow as pa

_SHOWN = 8
"""Columns that are named at once."""


def number_problems(job: Job, **options: str | None) -> Iterator[Problem]:
    """Columns that have to hold numbers, and are of another type.

    Args:
        job: whose data sets are looked at.
        options: an option's name to the column that the user gave; None for none.
    """
    for option, column in options.items():
        for dataset in job.datasets.values():
            # A name of another type is a problem of its own.
            kind = _type_of(dataset, column) if isinstance(column, str) else None
            if kind is not None and not is_number(kind):
                yield Problem(
                    field=option,
                    what=f"the column {column!r} of the data set {dataset.name!r} is {kind}, and "
                    "not a number",
                    remedy="Number the classes from 0, as pandas.factorize does"
                    if option == "label" and is_category(kind)
                    else "Turn it into a number, or name another column",
                )


def feature_problems(
    job: Job, others: Iterable[str], *, categorical: Collection[str], forbidden: str
) -> Iterator[Problem]:
    """Features that can't be trained on, or that the data sets don't have in common.

    Args:
        job: whose data sets are looked at.
        others: columns that aren't features.
        categorical: features that are categories although they are numbers.
        forbidden: characters that the framework allows in no feature's name.
    """
    train, others = job.datasets.get("train"), set(others)
    for dataset in job.datasets.values():
        field = f"datasets[{dataset.name!r}]"
        features = [name for name in dataset.columns if name not in others]
        if dataset.columns and not features:
            yield Problem(
                field=field,
                what=f"it has no features, only {_listed(dataset.columns)}",
                remedy="Give it columns to learn from",
            )
        if unusable := [name for name in features if not _is_feature(_type_of(dataset, name))]:
            yield Problem(
                field=field,
                what="no numbers, strings or categories are in "
                + _listed(
                    [f"{name!r} ({_type_of(dataset, name)})" for name in unusable], plain=True
                ),
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


def is_number(kind: pa.DataType) -> bool:
    """Whether values of a type can be used as numbers; missing ones are NaN then."""
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


def _is_feature(kind: pa.DataType | None) -> bool:
    return kind is None or is_number(kind) or is_category(kind)


def _type_of(dataset: DatasetInfo, column: str) -> pa.DataType | None:
    """A column's type; None if it, or the column, isn't known."""
    if dataset.schema is None or dataset.schema.get_field_index(column) < 0:
        return None
    return dataset.schema.field(column).type


def _different(field: str, expected: Sequence[str], features: Sequence[str]) -> Iterator[Problem]:
    theirs, ours = set(expected), set(features)
    if missing := [name for name in expected if name not in ours]:
        yield Problem(
            field=field,
            what=f"it lacks {_listed(missing)}, which 'train' has",
            remedy="Give it the columns of 'train'; in which order makes no difference",
        )
    if extra := [name for name in features if name not in theirs]:
        yield Problem(
            field=field,
            what=f"it has {_listed(extra)}, which 'train' hasn't",
            remedy="Give both the same columns, as with dataset_config={'train': "
            "DataConfig(columns=[…]), …}",
        )


def _of_another_kind(
    field: str, name: str, train: DatasetInfo, dataset: DatasetInfo, categorical: bool
) -> Iterator[Problem]:
    """Categories in one data set, and numbers in the other."""
    one, other = _type_of(train, name), _type_of(dataset, name)
    if one is None or other is None or not (_is_feature(one) and _is_feature(other)):
        return
    if str(other) == "null":
        # Nothing but missing values, which may be of anything.
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
            what=f"the feature(s) {_listed(wrong)} can't be called that: names mustn't have "
            f"{' '.join(map(repr, forbidden))} in them",
            remedy="Rename it in all data sets",
        )


def _listed(names: Sequence[str], *, plain: bool = False) -> str:
    shown = ", ".join(names[:_SHOWN] if plain else map(repr, names[:_SHOWN]))
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown


def constraint_problems(
    job: Job, others: Iterable[str], params: Mapping[str, Any], *names: str
) -> Iterator[Problem]:
    """Parameters about features that the data set "train" doesn't have.

    Args:
        job: whose data sets are looked at.
        others: columns that aren't features.
        params: the framework's parameters, as the user gave them.
        names: those whose value is a list with an entry for each feature, a dict by feature, or a
            list of lists of features.
    """
    train, besides = job.datasets.get("train"), set(others)
    if train is None or not train.columns:
        return
    features = [column for column in train.columns if column not in besides]
    for name in names:
        value = params.get(name)
        entries = value if isinstance(value, list | tuple | Mapping) else ()
        nested = [entry for entry in entries if isinstance(entry, list | tuple | set)]
        if isinstance(value, list | tuple) and not nested and len(value) != len(features):
            yield Problem(
                field=f"params[{name!r}]",
                what=f"it has {len(value)} entries for {len(features)} features",
                remedy=f"Give an entry for each, in this order: {_listed(features)}",
            )
        named = value if isinstance(value, Mapping) else [each for some in nested for each in some]
        unknown = [entry for entry in named if isinstance(entry, str) and entry not in features]
        if unknown:
            yield Problem(
                field=f"params[{name!r}]",
                what=f"{_listed(unknown)} is no feature",
                remedy=f"The features are: {_listed(features)}",
            )
