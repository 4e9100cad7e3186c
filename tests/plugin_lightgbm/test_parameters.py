"""What LightGBM is really given, and what the model says of it afterwards."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
import pytest
from tests.ranges import values_at_the_ends

from polytrain import InvalidJobError, RunConfig, ScalingConfig, make_trainer
from polytrain_lightgbm import LightGBM
from polytrain_lightgbm.parameters import RANGES

X = np.random.default_rng(0).normal(size=200)
DATA = {"x": X, "y": (X > 0).astype(float)}


def test_the_workers_cpus_are_its_threads() -> None:
    assert LightGBM().booster_params(threads=3)["num_threads"] == 3


@pytest.mark.parametrize("name", ["num_threads", "num_thread", "n_jobs", "nthread"])
def test_a_users_threads_win_however_they_are_spelt(name: str) -> None:
    params = LightGBM(params={name: 2}).booster_params(threads=3)
    assert {key: value for key, value in params.items() if "thread" in key or "jobs" in key} == {
        name: 2
    }


def test_the_model_tells_the_users_parameters_and_none_of_the_runs(tmp_path: Path) -> None:
    params = {
        "objective": "binary",
        "verbose": 0,
        "subsample": 0.75,
        "bagging_freq": 2,
        "feature_fraction": 0.5,
        "feature_fraction_seed": 5,
    }
    trainer = make_trainer(
        "lightgbm",
        label="y",
        params=params,
        num_boost_round=4,
        datasets={"train": DATA},
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(storage_path=tmp_path, progress=False),
    )
    text = trainer.fit().load_model().model_to_string()
    found = dict(re.findall(r"^\[(\w+): (.*)\]$", text, flags=re.MULTILINE))
    users = {
        "objective": "binary",
        "verbosity": "0",
        "bagging_fraction": "0.75",
        "bagging_freq": "2",
        "feature_fraction_seed": "5",
        "num_iterations": "4",
    }
    one_process = {
        "num_machines": "1",
        "tree_learner": "serial",
        "pre_partition": "0",
        "num_threads": "0",
        "boost_from_average": "1",
        "bin_construct_sample_cnt": "200000",
    }
    assert {name: found[name] for name in users} == users
    assert {name: found[name] for name in one_process} == one_process


def takes(name: str, value: float) -> bool:
    """Whether LightGBM itself makes a booster with this value of a parameter."""
    rows = lightgbm.Dataset(X[:, None], DATA["y"], params={"verbosity": -1})
    try:
        lightgbm.Booster({"verbosity": -1, name: value}, rows)
    except lightgbm.basic.LightGBMError:
        return False
    return True


@pytest.mark.parametrize("name", RANGES)
def test_ranges_are_lightgbms(name: str) -> None:
    for value, is_in in values_at_the_ends(RANGES[name]):
        assert takes(name, value) == (value in RANGES[name]) == is_in


@pytest.mark.parametrize("name", ["num_leaves", "max_leaf"])
def test_a_parameter_out_of_its_range_is_refused_before_workers_start(name: str) -> None:
    with pytest.raises(InvalidJobError) as refused:
        make_trainer("lightgbm", label="y", params={name: 1}, datasets={"train": DATA})
    assert f"params['{name}']: it must be at least 2 and at most 131,072; got 1" in str(
        refused.value
    )


BAGGING = {"bagging_freq": 1, "bagging_fraction": 0.5}


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"boosting": "rf"}, "boosting"),
        ({"boost": "random_forest", **BAGGING, "bagging_fraction": 1}, "boost"),
        ({"boosting": "rf", **BAGGING}, None),
        ({"boosting": "RF"}, "boosting"),
        ({"boosting": "GBDT", "data_sample_strategy": "GOSS"}, None),
        ({"boosting": "GOSS", **BAGGING}, "bagging_freq"),
        ({"boosting": "rf", "feature_fraction": 0.5}, None),
        ({"boosting": "goss", **BAGGING}, "bagging_freq"),
        ({"data_sample_strategy": "goss", **BAGGING}, "bagging_freq"),
        ({"data_sample_strategy": "goss", "top_rate": 0.8, "other_rate": 0.3}, "other_rate"),
        ({"data_sample_strategy": "goss", "top_rate": 0}, "top_rate"),
        ({"data_sample_strategy": "goss", "other_rate": 0.0}, "other_rate"),
        ({"data_sample_strategy": "goss"}, None),
        ({"boosting": "gbtree"}, "boosting"),
        ({"data_sample_strategy": "gos"}, "data_sample_strategy"),
    ],
)
def test_draws_that_lightgbm_refuses_are_refused_before_workers_start(
    params: dict[str, Any], named: str | None
) -> None:
    rows = lightgbm.Dataset(X[:, None], DATA["y"], params={"verbosity": -1})
    if named is None:
        make_trainer("lightgbm", label="y", params=params, datasets={"train": DATA})
        lightgbm.train({"verbosity": -1, **params}, rows, 1)
        return
    with pytest.raises(InvalidJobError) as refused:
        make_trainer("lightgbm", label="y", params=params, datasets={"train": DATA})
    assert f"- params['{named}']: " in str(refused.value)
    with pytest.raises(lightgbm.basic.LightGBMError):
        lightgbm.train({"verbosity": -1, **params}, rows, 1)
