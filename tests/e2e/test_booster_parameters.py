"""XGBoost's and LightGBM's own parameters, one by one: two workers train what one process does."""

from __future__ import annotations

from typing import Any

import lightgbm
import numpy as np
import pyarrow as pa
import pytest
import xgboost
from tests.e2e.boosters import LOGISTIC, ROUNDS, a_table, fit, trained
from tests.sweeps import only_in_sweep

import polytrain_lightgbm
import polytrain_xgboost
from polytrain import RunConfig
from polytrain_lightgbm import LightGBM
from polytrain_xgboost import XGBoost

XGBOOST_EACH_TIME: list[dict[str, Any]] = [
    {"max_bin": 16},
    {"monotone_constraints": {"x0": 1, "x3": -1}},
]
XGBOOST_IN_SWEEP: list[dict[str, Any]] = [
    {"max_bin": 512},
    {"max_bin": 2},
    {"eta": 0.1},
    {"gamma": 1.0},
    {"max_depth": 0, "max_leaves": 7, "grow_policy": "lossguide"},
    {"min_child_weight": 5},
    {"max_delta_step": 1},
    {"lambda": 3},
    {"alpha": 1},
    {"tree_method": "hist"},
    {"tree_method": "auto"},
    {"scale_pos_weight": 3},
    {"refresh_leaf": 1},
    {"max_leaves": 5},
    {"num_parallel_tree": 3},
    {"monotone_constraints": "(1,0,0,-1,0)"},
    {"interaction_constraints": [["x0", "x1"]]},
    {"max_cat_to_onehot": 4},
    {"base_score": 0.3},
    {"eval_metric": ["auc", "error@0.3"]},
    {"updater": "grow_quantile_histmaker"},
    {"max_cached_hist_node": 1000},
    {"objective": "binary:logitraw"},
    {"objective": "binary:hinge"},
    {"objective": "reg:logistic"},
    {"objective": "reg:squarederror"},
    {"objective": "reg:squaredlogerror"},
    {"objective": "reg:pseudohubererror", "huber_slope": 0.5},
    {"objective": "reg:tweedie", "tweedie_variance_power": 1.3},
    {"objective": "count:poisson", "max_delta_step": 0.7},
    {"objective": "reg:absoluteerror"},
    {"objective": "reg:quantileerror", "quantile_alpha": 0.7},
]

LIGHTGBM_EACH_TIME: list[dict[str, Any]] = [
    {"feature_contri": [1, 0.5, 1, 0.1, 1]},
    {"max_bin_by_feature": [16, 32, 64, 255, 100]},
]
LIGHTGBM_IN_SWEEP: list[dict[str, Any]] = [
    {"max_bin": 15},
    {"min_data_in_bin": 10},
    {"max_depth": 3},
    {"num_leaves": 7},
    {"min_data_in_leaf": 50},
    {"min_sum_hessian_in_leaf": 5.0},
    {"path_smooth": 1.0},
    {"boost_from_average": False},
    {"zero_as_missing": True},
    {"use_missing": False},
    {"enable_bundle": False},
    {"cegb_penalty_split": 0.01},
    {"cegb_penalty_feature_coupled": [0.1, 0, 0, 0, 0]},
    {"reg_sqrt": True},
    {"learning_rate": 0.3},
    {"objective": "regression_l1"},
    {"objective": "quantile", "alpha": 0.7},
    {"objective": "mape"},
    {"force_row_wise": True},
    {"deterministic": True},
]

LIGHTGBM_NEAR_EACH_TIME: list[tuple[str, dict[str, Any]]] = [
    ("any", {"objective": "fair"}),
    ("any", {"objective": "regression", "data_sample_strategy": "goss"}),
]
LIGHTGBM_NEAR_IN_SWEEP: list[tuple[str, dict[str, Any]]] = [
    ("any", {"objective": "huber"}),
    *(("positive", {"objective": name}) for name in ("poisson", "gamma", "tweedie")),
    *(("share", {"objective": name}) for name in ("cross_entropy", "cross_entropy_lambda")),
    ("class", {"objective": "binary"}),
    ("class", {"objective": "binary", "is_unbalance": True}),
    ("class", {"objective": "binary", "scale_pos_weight": 3}),
    ("classes", {"objective": "multiclass", "num_class": 4}),
    ("classes", {"objective": "multiclassova", "num_class": 4}),
    ("any", {"objective": "regression", "boosting": "dart"}),
    ("any", {"objective": "regression", "boosting": "rf", "subsample_freq": 1, "subsample": 0.6}),
    ("any", {"objective": "regression", "boosting": "rf", "feature_fraction": 0.6}),
    ("any", {"objective": "regression", "bagging_freq": 1, "bagging_fraction": 0.5}),
    ("any", {"objective": "regression", "feature_fraction": 0.6}),
    ("any", {"objective": "regression", "feature_fraction_bynode": 0.6}),
    ("any", {"objective": "regression", "extra_trees": True}),
    ("any", {"objective": "regression", "use_quantized_grad": True}),
    ("class", {"objective": "binary", "bagging_freq": 1, "pos_bagging_fraction": 0.5}),
    ("any", {"objective": "regression", "lambda_l1": 5.0}),
    ("any", {"objective": "regression", "lambda_l2": 30.0}),
    ("any", {"objective": "regression", "min_gain_to_split": 1.0}),
    ("any", {"objective": "regression", "max_delta_step": 0.2}),
    ("any", {"objective": "regression", "monotone_constraints": [1, 0, 0, 0, 0]}),
]


def cases(each_time: list[dict[str, Any]], in_sweep: list[dict[str, Any]]) -> list[Any]:
    return [
        *(pytest.param(params, id=str(params)) for params in each_time),
        *(only_in_sweep(params, id=str(params)) for params in in_sweep),
    ]


@pytest.fixture(scope="module")
def table() -> pa.Table:
    return a_table().drop_columns(["kind"])


@pytest.mark.sweep
@pytest.mark.parametrize("params", cases(XGBOOST_EACH_TIME, XGBOOST_IN_SWEEP))
def test_two_workers_of_xgboost_train_the_model_of_one_process(
    quiet: RunConfig, table: pa.Table, params: dict[str, Any]
) -> None:
    params = {**LOGISTIC["xgboost"], **params}
    matrix = xgboost.QuantileDMatrix(
        table.drop_columns(["y"]),
        label=table.column("y").to_numpy(),
        ref=polytrain_xgboost.bin_reference(table, XGBoost(params=params, label="y")),
        max_bin=params.get("max_bin", 256),
    )
    alone = xgboost.train(params, matrix, num_boost_round=ROUNDS)
    assert trained(quiet, table, 2, backend="xgboost", params=params) == alone.save_raw()


@pytest.mark.sweep
@pytest.mark.parametrize("params", cases(LIGHTGBM_EACH_TIME, LIGHTGBM_IN_SWEEP))
def test_two_workers_of_lightgbm_train_the_trees_of_one_process(
    quiet: RunConfig, table: pa.Table, params: dict[str, Any]
) -> None:
    params = {"objective": "regression", **params}
    features = table.drop_columns(["y"])
    dataset = lightgbm.Dataset(
        np.column_stack([column.to_numpy() for column in features.columns]),
        label=table.column("y").to_numpy(),
        feature_name=features.column_names,
        reference=polytrain_lightgbm.bin_reference(table, LightGBM(params=params, label="y")),
    )
    alone = lightgbm.train(
        {**params, "verbosity": -1, "num_threads": 1},
        dataset,
        ROUNDS,
        # Otherwise LightGBM reads it back, and loses the weight of a leaf without a split.
        keep_training_booster=True,
    )
    ours = trained(quiet, table, 2, backend="lightgbm", params=params).decode()
    assert trees_in(ours) == trees_in(alone.model_to_string())


X = np.random.default_rng(0).normal(size=(2000, 5))
RAW = X[:, 0] + 0.5 * X[:, 1] ** 2 - 0.5 * X[:, 2] * X[:, 3]
LABELS = {
    "any": RAW,
    "positive": RAW - RAW.min() + 0.1,
    "share": 1 / (1 + np.exp(-RAW)),
    "class": (RAW > 0.5).astype(float),
    "classes": np.digitize(RAW, [-0.5, 0.5, 1.5]).astype(float),
}


def near_cases() -> list[Any]:
    each_time, in_sweep = (
        [pytest.param(*case, id=f"{case[1]}") for case in some]
        for some in (LIGHTGBM_NEAR_EACH_TIME, LIGHTGBM_NEAR_IN_SWEEP)
    )
    return [*each_time, *(only_in_sweep(*case.values, id=str(case.id)) for case in in_sweep)]


@pytest.mark.sweep
@pytest.mark.parametrize(("labels", "params"), near_cases())
def test_two_workers_of_lightgbm_train_nearly_the_model_of_one_process(
    quiet: RunConfig, labels: str, params: dict[str, Any]
) -> None:
    """Where rows, columns or counts are drawn or estimated, another way of doing so is as good."""
    names = [f"x{column}" for column in range(5)]
    table = pa.table({**dict(zip(names, X.T, strict=True)), "y": LABELS[labels]})
    dataset = lightgbm.Dataset(
        X,
        LABELS[labels],
        feature_name=names,
        reference=polytrain_lightgbm.bin_reference(table, LightGBM(params=params, label="y")),
    )
    alone = lightgbm.train({**params, "verbosity": -1, "num_threads": 1}, dataset, 30).predict(X)
    ours = fit(quiet, table, 2, backend="lightgbm", params=params, num_boost_round=30)
    predicted = ours.load_model().predict(X)
    assert np.corrcoef(alone.ravel(), predicted.ravel())[0, 1] > 0.98
    assert np.abs(alone - predicted).mean() < 0.15 * alone.std()


def trees_in(text: str) -> str:
    return text.partition("parameters:")[0]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("method", ["basic", "advanced"])
def test_constraints_of_lightgbm_are_about_the_users_columns(
    quiet: RunConfig,
    table: pa.Table,
    num_workers: int,
    method: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What is predicted rises with the first column, and falls with the fourth. That several
    machines have one method only is said."""
    params = {
        "objective": "regression",
        "monotone_constraints": [1, 0, 0, -1, 0],
        "monotone_constraints_method": method,
    }
    model = fit(quiet, table, num_workers, backend="lightgbm", params=params).load_model()
    rows = np.random.default_rng(2).normal(size=(50, 5))
    for column, sign in ((0, 1), (3, -1)):
        predicted = []
        for moved in np.linspace(-3, 3, 20):
            rows[:, column] = moved
            predicted.append(model.predict(rows))
        steps = sign * np.diff(predicted, axis=0)
        assert steps.min() >= 0
        if column == 0:
            assert steps.max() > 0
    if num_workers == 0:
        assert ("'advanced' and takes 'basic'" in caplog.text) is (method == "advanced")
