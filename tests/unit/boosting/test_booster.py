"""What boosters share of options and checks, of one that has no framework."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from tests.unit.boosting.stumps import Stumps

from polytrain.boosting.booster import Booster
from polytrain_plugins import DatasetInfo, Job

TRAIN = DatasetInfo(name="train", columns=("x", "q", "s", "w", "y"), num_rows=100)
JOB = Job(
    num_workers=2,
    use_gpu=False,
    cpus_per_worker=1,
    has_training_function=False,
    datasets={"train": TRAIN, "valid": replace(TRAIN, name="valid")},
)


def fields(job: Job = JOB, **options: Any) -> list[str]:
    return sorted({problem.field for problem in Stumps(**{"label": "y", **options}).problems(job)})


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({}, []),
        ({"weight": "w", "begin": "s", "search": "q", "early_stopping_rounds": 3}, []),
        ({"label": None}, ["label"]),
        ({"begin": "nope", "search": "none"}, ["begin", "search"]),
        ({"search": ["q", "w"], "num_boost_round": 0}, ["num_boost_round", "search"]),
        ({"num_boost_round": 0, "bin_sample_rows": 0}, ["bin_sample_rows", "num_boost_round"]),
        ({"early_stopping_rounds": 0}, ["early_stopping_rounds"]),
        ({"categorical": "x"}, ["categorical"]),
        ({"model": "/no/such/file"}, ["model"]),
        ({"params": "depth=3"}, ["params"]),
        ({"loud": True, "params": "depth=3"}, ["loud", "params"]),
    ],
    ids=str,
)
def test_options_are_reported_by_the_names_that_the_booster_has_for_them(
    options: dict[str, Any], wrong: list[str]
) -> None:
    assert fields(**options) == wrong


def test_a_parameter_that_is_none_is_not_given() -> None:
    options = Stumps(label="y", params={"depth": None, "rate": 0.5, "signs": np.ones(4)})
    assert list(options.params) == ["rate", "signs"]
    assert Stumps(label="y", params=MappingProxyType({"depth": None})).params == {}


@pytest.mark.parametrize(
    ("params", "what"),
    [
        ({"depth": 3, "rate": "0.1", "own": 7}, None),
        ({"depth": 2.5}, "2.5 is not a whole number"),
        ({"rate": "fast"}, "'fast' is not a number"),
        ({"deptth": 3}, "Stumps has no parameter of this name, and would ignore it"),
        ({"eta": 0.1}, "it is a parameter of Forests"),
        ({"steps": 9}, "it is the number of rounds"),
        ({"workers": 2}, "2 threads are more than a worker's 1 CPU"),
        ({"signs": [1, 0]}, "it has 2 entries for 4 features"),
    ],
    ids=str,
)
def test_parameters_are_looked_at(params: dict[str, Any], what: str | None) -> None:
    found = list(Stumps(label="y", params=params).problems(JOB))
    assert [(each.field, each.what) for each in found] == (
        [] if what is None else [(f"params[{next(iter(params))!r}]", what)]
    )


def test_with_a_function_no_option_is_used() -> None:
    with_function = replace(JOB, has_training_function=True)
    assert fields(with_function, label=None) == []
    given = fields(with_function, loud=True, params={"depth": 3}, begin="nope")
    assert given == ["begin", "label", "loud", "params"]


def test_what_has_a_meaning_of_its_own_is_no_feature() -> None:
    options = Stumps(label="y", weight="w", begin="s", search="q", categorical=["x"])
    assert options.columns_besides_features == ("y", "w", "s", "q")
    assert options.features_of(TRAIN.columns) == ["x"]
    # One column may be two things.
    assert Stumps(label="y", weight="y").columns_besides_features == ("y",)


def test_what_its_workers_need() -> None:
    demand = Stumps(label="y", search="q").demand(JOB)
    assert (demand.preload, demand.group, demand.reads_tables) == (("stumps",), "q", True)
    assert demand.whole_datasets == {"valid"}
    assert Stumps().demand(replace(JOB, has_training_function=True)).whole_datasets == set()


def test_a_booster_that_lacks_its_own_part_is_not_made() -> None:
    class Nothing(Booster):
        pass

    with pytest.raises(TypeError, match="parameter_problems"):
        Nothing()  # type: ignore[abstract]
