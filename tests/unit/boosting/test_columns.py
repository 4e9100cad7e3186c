"""What names and types of columns tell of a job, before anything is started."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from polytrain.boosting.problems import feature_problems
from polytrain_plugins import DatasetInfo, Job, Problem, is_category, is_number, number_problems

LIST = pa.list_(pa.int64())


def job(**schemas: dict[str, Any]) -> Job:
    datasets = {
        name: DatasetInfo(
            name=name, columns=tuple(fields), num_rows=9, schema=pa.schema(list(fields.items()))
        )
        for name, fields in schemas.items()
    }
    return Job(
        num_workers=2,
        use_gpu=False,
        cpus_per_worker=1,
        has_training_function=False,
        datasets=datasets,
    )


def found(job: Job, *, categorical: tuple[str, ...] = (), forbidden: str = "") -> list[Problem]:
    return list(feature_problems(job, ["y"], categorical=categorical, forbidden=forbidden))


def train(kind: pa.DataType) -> dict[str, Any]:
    return {"x": kind, "y": pa.float64()}


NUMBERS = [
    *(pa.int8(), pa.uint64(), pa.float16(), pa.float64(), pa.bool_(), pa.null()),
    *(pa.decimal128(5, 2), pa.dictionary(pa.int8(), pa.int64())),
]
STRINGS = [pa.string(), pa.large_string(), pa.dictionary(pa.int8(), pa.string())]
NEITHER = [
    *(pa.timestamp("us"), pa.date32(), pa.duration("s"), LIST, pa.struct([("a", pa.int8())])),
    *(pa.binary(), pa.dictionary(pa.int8(), pa.date32()), pa.list_(pa.int8(), 2)),
]


@pytest.mark.parametrize("kind", NUMBERS, ids=str)
def test_numbers_can_be_anything(kind: pa.DataType) -> None:
    assert is_number(kind)
    assert found(job(train=train(kind))) == []
    assert list(number_problems(job(train=train(kind)), label="x", weight=None)) == []


@pytest.mark.parametrize("kind", STRINGS, ids=str)
def test_strings_are_features_and_no_labels(kind: pa.DataType) -> None:
    assert is_category(kind)
    assert found(job(train=train(kind))) == []
    of_classes, other = number_problems(
        job(train=train(kind)), of_classes=("label",), label="x", weight="x"
    )
    assert (of_classes.field, other.field) == ("label", "weight")
    for problem in (of_classes, other):
        assert f"'x' of the data set 'train' is {kind}" in problem.what
        assert ("pandas.factorize" in problem.remedy) == (problem is of_classes)


@pytest.mark.parametrize("kind", NEITHER, ids=str)
def test_other_types_are_neither(kind: pa.DataType) -> None:
    [problem] = found(job(train=train(kind)))
    assert problem.field == "datasets['train']"
    assert f"'x' ({kind})" in problem.what
    assert "DataConfig(columns=[…])" in problem.remedy
    [problem] = number_problems(job(train=train(kind)), label="x")
    assert f"is {kind}" in problem.what


def test_many_columns_of_a_kind_are_one_problem() -> None:
    fields = {f"t{i}": pa.date32() for i in range(20)}
    [problem] = found(job(train={**fields, "x": pa.int8()}))
    assert "'t7' (date32[day]) and 12 more" in problem.what


def test_data_sets_have_the_same_features_in_any_order() -> None:
    one = {"a": pa.int8(), "b": pa.string(), "y": pa.int8()}
    assert found(job(train=one, valid=dict(reversed(one.items())))) == []
    [problem] = found(job(train=one, valid={"a": pa.int8(), "y": pa.int8()}))
    assert problem.field == "datasets['valid']"
    assert problem.what == "it lacks 'b', which 'train' has"
    [problem] = found(job(train=one, valid={**one, "c": pa.int8()}))
    assert problem.what == "it has 'c', which 'train' lacks"


@pytest.mark.parametrize(
    ("one", "other", "is_reported"),
    [
        (pa.int8(), pa.float64(), False),
        (pa.string(), pa.large_string(), False),
        (pa.string(), pa.dictionary(pa.int8(), pa.string()), False),
        (pa.string(), pa.null(), False),
        (pa.string(), pa.int8(), True),
        (pa.int8(), pa.string(), True),
        (pa.int64(), pa.dictionary(pa.int8(), pa.int64()), True),
        (pa.dictionary(pa.int8(), pa.string()), pa.dictionary(pa.int8(), pa.int64()), True),
    ],
    ids=str,
)
def test_data_sets_have_the_same_kind_of_values(
    one: pa.DataType, other: pa.DataType, is_reported: bool
) -> None:
    problems = found(job(train=train(one), valid=train(other)))
    assert ["'x' is" in problem.what for problem in problems] == [True] * is_reported


def test_numbers_that_are_categories_are_so_with_and_without_a_list() -> None:
    both = job(train=train(pa.int64()), valid=train(pa.dictionary(pa.int8(), pa.int64())))
    assert found(both, categorical=("x",)) == []


def test_there_is_something_to_learn_from() -> None:
    [problem] = found(job(train={"y": pa.int8()}))
    assert "no features" in problem.what


def test_characters_that_a_framework_refuses_are_refused_in_features() -> None:
    fields = {"a[b": pa.int8(), "y": pa.int8()}
    [problem] = found(job(train=fields), forbidden="[]<")
    assert "'a[b'" in problem.what
    assert "'[' ']' '<'" in problem.what
    assert found(job(train=fields), forbidden="<") == []


def test_what_is_not_known_is_no_problem() -> None:
    """What is wrong with such a data set has been told already."""
    unknown = Job(
        num_workers=2,
        use_gpu=False,
        cpus_per_worker=1,
        has_training_function=False,
        datasets={"train": DatasetInfo(name="train"), "valid": DatasetInfo(name="valid")},
    )
    assert found(unknown, forbidden="[") == []
    assert list(number_problems(unknown, label="y")) == []
