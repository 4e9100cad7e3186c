"""Accelerated failure times by XGBoost: each row has two bounds in place of a label."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import xgboost

from polytrain import Result, RunConfig, ScalingConfig, TrainingFailedError, make_trainer

ROUNDS = 8
PARAMS = {
    "objective": "survival:aft",
    "aft_loss_distribution_scale": 1.2,
    "eval_metric": ["aft-nloglik", "interval-regression-accuracy"],
    "max_depth": 3,
}


def rows() -> pa.Table:
    """Events that were seen, that weren't by the end of a study, or that lie in an interval."""
    draws = np.random.default_rng(0)
    a, b = draws.normal(size=(2, 101)).round(2)
    low = np.exp(0.5 * a - 0.3 * b + 1)
    high = np.where(draws.random(101) < 0.6, low, np.inf)
    high[:10], low[:5] = 1.5 * low[:10], 0
    return pa.table({"a": a, "b": b, "low": low, "high": high})


def fit(config: RunConfig, table: pa.Table, num_workers: int, **options: Any) -> Result:
    return make_trainer(
        "xgboost",
        params=PARAMS,
        label_lower_bound="low",
        label_upper_bound="high",
        num_boost_round=ROUNDS,
        datasets={"train": table, "valid": table.slice(0, 20)},
        scaling_config=ScalingConfig(num_workers=num_workers),
        run_config=config,
        **options,
    ).fit()


def matrix(table: pa.Table, ref: Any = None) -> xgboost.QuantileDMatrix:
    return xgboost.QuantileDMatrix(
        table.select(["a", "b"]),
        label_lower_bound=table["low"].to_numpy(),
        label_upper_bound=table["high"].to_numpy(),
        ref=ref,
    )


@pytest.mark.parametrize(
    ("num_workers", "options"), [(0, {}), (2, {}), (2, {"external_memory": True})]
)
def test_it_is_what_xgboost_trains_in_one_process(
    quiet: RunConfig, num_workers: int, options: dict[str, Any]
) -> None:
    table = rows()
    result = fit(quiet, table, num_workers, **options)
    train = matrix(table)
    data = {"train": train, "valid": matrix(table.slice(0, 20), ref=train)}
    scores: dict[str, Any] = {}
    alone = xgboost.train(
        PARAMS,
        train,
        ROUNDS,
        evals=[(each, name) for name, each in data.items()],
        evals_result=scores,
        verbose_eval=False,
    )
    expected = alone.predict(xgboost.DMatrix(table.select(["a", "b"])))
    assert result.predict(table).tolist() == expected.tolist()
    for name, metrics in scores.items():
        for metric, values in metrics.items():
            assert result.metrics[f"{name}-{metric}"] == pytest.approx(values[-1], rel=1e-6)


def test_bounds_that_no_label_has_are_refused(tmp_path: Path) -> None:
    table = rows()
    wrong = {
        "low": (-1.0, "'low' isn't a label of the objective 'survival:aft'"),
        "high": (0.001, "'high - low' is negative"),
    }
    for column, (value, what) in wrong.items():
        values = table[column].to_numpy().copy()
        values[50] = value
        broken = table.set_column(table.column_names.index(column), column, pa.array(values))
        config = RunConfig(name=column, storage_path=tmp_path, progress=False)
        with pytest.raises(TrainingFailedError, match=f"in 1 of 101 row.* the column {what}"):
            fit(config, broken, 0)
