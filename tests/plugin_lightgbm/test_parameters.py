"""What LightGBM is really given, and what the model says of it afterwards."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from polytrain import RunConfig, ScalingConfig, make_trainer
from polytrain_lightgbm import LightGBM

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
