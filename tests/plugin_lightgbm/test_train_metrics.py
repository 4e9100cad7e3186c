"""Metrics of the training rows, which are on all machines."""

from __future__ import annotations

import lightgbm
import numpy as np
import pyarrow as pa
import pytest

from polytrain_lightgbm.backend import LightGBM
from polytrain_lightgbm.collective import Collective
from polytrain_lightgbm.datasets import Rows
from polytrain_lightgbm.train_metrics import TrainMetrics


@pytest.mark.parametrize("objective", ["cross_entropy_lambda", "cross_entropy", "regression"])
@pytest.mark.parametrize("weight", [None, "w"])
def test_a_metric_is_lightgbms_own(objective: str, weight: str | None) -> None:
    """The objective may convert scores, and LightGBM's metrics do so without one."""
    metrics = ["cross_entropy_lambda", "cross_entropy", "l2", "rmse", "r2"]
    x = np.random.default_rng(0).normal(size=200)
    rows = pa.table({"x": x, "y": 1 / (1 + np.exp(-x)), "w": 1.0 + np.arange(200) % 3})
    params = {"objective": objective, "metric": metrics}
    options = LightGBM(label="y", weight=weight, params=params)
    mine = Rows(table=rows, options=options)
    data = lightgbm.Dataset(x.reshape(-1, 1), mine.labels, weight=mine.weights)
    booster = lightgbm.Booster(options.booster_params(1), data)
    booster.set_train_data_name("train")
    found = TrainMetrics(booster, options, mine, Collective([]))
    booster.update()
    assert found.after_round() == [pytest.approx(each) for each in booster.eval_train()]
