"""Objectives and metrics of boosters whose shards aren't alike.

A shard has only zeros, or its rows weigh nothing, or they are sorted.
"""

from __future__ import annotations

import re
from typing import Any

import lightgbm
import numpy as np
import pyarrow as pa
import pytest
from tests.e2e.boosters import fit, model_of, same_everywhere

import polytrain_lightgbm
from polytrain import RunConfig
from polytrain_lightgbm import LightGBM

ROWS = 800


def a_table(labels: Any, **columns: Any) -> pa.Table:
    x = np.random.default_rng(0).normal(size=(ROWS, 3))
    return pa.table({**{f"x{i}": x[:, i] for i in range(3)}, "y": labels(x), **columns})


def rare(x: Any) -> Any:
    """Events in the last quarter of the rows alone."""
    return np.where(np.arange(ROWS) < ROWS * 3 // 4, 0.0, (x[:, 0] > 0) * 1.0)


def a_weightless_half() -> Any:
    return (np.arange(ROWS) >= ROWS // 2) * 1.0


def shuffled(table: pa.Table) -> pa.Table:
    return table.take(pa.array(np.random.default_rng(1).permutation(ROWS)))


def trees_of(model: lightgbm.Booster) -> str:
    return model.model_to_string().partition("\nparameters:")[0]


def alone(
    table: pa.Table, params: dict[str, Any], callbacks: Any = (), **options: Any
) -> lightgbm.Booster:
    """The model of LightGBM in one process, on the same bins."""
    weight = options.get("weight")
    features = table.drop_columns(["y", *([weight] if weight else [])])
    data = lightgbm.Dataset(
        features,
        label=table["y"].to_numpy(),
        weight=table[weight].to_numpy() if weight else None,
        reference=polytrain_lightgbm.bin_reference(
            table, LightGBM(params=params, label="y", **options)
        ),
    )
    params = {**params, "verbosity": -1}
    return lightgbm.train(params, data, num_boost_round=10, callbacks=[*callbacks])


def features_of(table: pa.Table) -> Any:
    return np.column_stack([table[f"x{i}"].to_numpy() for i in range(3)])


@pytest.mark.sweep(one_in=3)
@pytest.mark.parametrize(
    ("objective", "num_workers"),
    [("poisson", 0), ("poisson", 2), ("tweedie", 0), ("cross_entropy", 0)],
)
def test_a_shard_may_have_only_zeros_and_a_shard_may_weigh_nothing(
    quiet: RunConfig, objective: str, num_workers: int
) -> None:
    weighted = objective == "cross_entropy"
    table = a_table(rare, **({"w": a_weightless_half()} if weighted else {}))
    options: dict[str, Any] = {"weight": "w"} if weighted else {}
    params = {"objective": objective, "num_leaves": 4}
    result = fit(quiet, table, num_workers, backend="lightgbm", params=params, **options)
    found = result.load_model().predict(features_of(table))
    mixed = fit(quiet, shuffled(table), num_workers, backend="lightgbm", params=params, **options)
    np.testing.assert_allclose(found, mixed.load_model().predict(features_of(table)), rtol=1e-6)
    expected = alone(table, params, **options).predict(features_of(table))
    assert np.corrcoef(found, expected)[0, 1] > 0.98
    np.testing.assert_allclose(found.mean(), expected.mean(), rtol=0.01)


RANKS = ("auc", "average_precision")
CLASSES = {"objective": "multiclass", "num_class": 3}


@pytest.mark.sweep(one_in=3)
@pytest.mark.parametrize(
    ("labels", "params"),
    [
        (lambda x: noisy(x) > 103, {"objective": "binary", "metric": [*RANKS, "binary_error"]}),
        (lambda x: np.arange(ROWS) % 3.0, {**CLASSES, "metric": ["auc_mu", "multi_logloss"]}),
        (lambda x: np.exp(x[:, 0]), {"objective": "gamma", "metric": ["gamma_deviance", "gamma"]}),
        (lambda x: x[:, 0], {"objective": "regression", "metric": ["rmse", "l1", "r2"]}),
        (lambda x: x[:, 0] > 0, {"objective": "cross_entropy", "metric": ["xentropy", "kldiv"]}),
    ],
    ids=["auc", "auc_mu", "gamma_deviance", "rmse", "cross_entropy"],
)
@pytest.mark.parametrize("weight", [None, "w"])
def test_a_metric_of_train_is_that_of_all_rows(
    quiet: RunConfig, labels: Any, params: dict[str, Any], weight: str | None
) -> None:
    """Rows are sorted, or the rows of one machine weigh nothing."""
    table = a_table(lambda x: labels(x) * 1.0, w=a_weightless_half())
    table = table if weight else table.drop_columns(["w"]).sort_by("y")
    result = fit(quiet, table, 0, backend="lightgbm", params=params, weight=weight)
    # LightGBM's own average_precision is NaN where rows that weigh nothing come first.
    counting = table.filter(pa.array(table["w"].to_numpy() > 0)) if weight else table
    scores = result.load_model().predict(features_of(counting), raw_score=True)
    data = lightgbm.Dataset(
        np.zeros((len(counting), 1)),
        label=counting["y"].to_numpy(),
        weight=counting[weight].to_numpy() if weight else None,
        init_score=scores,
    )
    params = {**params, "boost_from_average": False, "verbosity": -1}
    expected = {f"train-{m}": v for _, m, v, *_ in lightgbm.Booster(params, data).eval_train()}
    assert result.metrics == pytest.approx(expected)


@pytest.mark.parametrize("weight", [None, "w"])
def test_a_metric_of_xgboosts_train_is_that_of_all_rows(
    quiet: RunConfig, weight: str | None
) -> None:
    """Rows are sorted, or the rows of one worker weigh nothing. "v" has the same rows."""
    metrics = ["auc", "aucpr", "pre@50", "logloss"]
    metrics = metrics[:2] if weight else metrics
    table = a_table(lambda x: (noisy(x) > 103) * 1.0, w=a_weightless_half())
    table = table if weight else table.drop_columns(["w"]).sort_by("y")
    found = fit(
        quiet,
        table,
        2,
        backend="xgboost",
        params={"objective": "binary:logistic", "max_depth": 2, "eval_metric": metrics},
        weight=weight,
        datasets={"v": table},
    ).metrics
    for metric in metrics:
        assert found[f"train-{metric}"] == pytest.approx(found[f"v-{metric}"])


def noisy(x: Any) -> Any:
    return 100 + 3 * x[:, 0] + np.random.default_rng(2).standard_t(2, ROWS)


@pytest.mark.sweep(one_in=3)
@pytest.mark.parametrize(
    "params",
    [
        {"objective": "reg:absoluteerror", "num_parallel_tree": 2},
        {"objective": "reg:quantileerror", "quantile_alpha": [0.1, 0.9], "subsample": 0.6},
    ],
    ids=["absoluteerror", "quantileerror"],
)
@pytest.mark.parametrize("weight", [None, "w"])
def test_leaves_of_xgboost_are_quantiles_of_all_rows(
    quiet: RunConfig, params: dict[str, Any], weight: str | None
) -> None:
    """Rows are sorted, or the rows of one worker weigh nothing. Inline is XGBoost alone."""
    table = a_table(noisy, w=a_weightless_half())
    table = table if weight else table.drop_columns(["w"]).sort_by("y")
    options = {"backend": "xgboost", "params": params, "weight": weight}
    two, inline = (fit(quiet, table, n, datasets={"v": table}, **options) for n in (2, 0))
    assert model_of(two) == model_of(inline)
    assert two.metrics == pytest.approx(inline.metrics)


def test_a_tree_without_a_split_is_the_same_at_any_size_and_after_a_restart(
    quiet: RunConfig,
) -> None:
    """LightGBM itself notes the rows of one machine there."""
    table = a_table(lambda x: np.where(np.arange(ROWS) < 3, 2.0, np.arange(ROWS) % 2))
    params = {**CLASSES, "num_leaves": 4, "min_sum_hessian_in_leaf": 10}
    options: dict[str, Any] = {"backend": "lightgbm", "params": params}
    two, three = (fit(quiet, table, size, num_boost_round=3, **options) for size in (0, 3))
    first = fit(quiet, table, 0, num_boost_round=1, **options)
    rest = fit(quiet, table, 0, num_boost_round=3, restore_from=first.checkpoint, **options)
    assert b"num_leaves=1\n" in model_of(two)
    assert f"leaf_count={ROWS}\n".encode() in model_of(two)
    assert model_of(two) == model_of(three) == model_of(rest)
    assert two.load_model().num_trees() == 9
    fewer = table.slice(0, ROWS - 6)
    other = fit(quiet, fewer, 0, num_boost_round=2, restore_from=first.checkpoint, **options)
    unsplit = re.compile(rb"num_leaves=1\n(?:.+\n)*?leaf_count=(\d+)")
    counts = [int(each) for each in unsplit.findall(model_of(other))]
    assert counts == [ROWS, ROWS - 6], "the first is a tree of the run before"


@pytest.mark.parametrize("objective", ["l1", "quantile", "mape"])
def test_leaves_of_lightgbm_are_percentiles_of_all_rows(quiet: RunConfig, objective: str) -> None:
    """Rows are sorted; many are predicted exactly, where the last bit of a score decides."""
    table = a_table(lambda x: noisy(x).round()).sort_by("y")
    rates, seen = [0.3 * 0.9**round_ for round_ in range(10)], []
    result = fit(
        quiet,
        table,
        0,
        backend="lightgbm",
        params={"objective": objective, "num_leaves": 7},
        datasets={"v": table},
        callbacks=[
            lightgbm.reset_parameter(learning_rate=rates),
            lambda env: seen.append(env.model.num_trees()),
        ],
    )
    expected = alone(
        table,
        {"objective": objective, "num_leaves": 7},
        callbacks=[lightgbm.reset_parameter(learning_rate=rates)],
    )
    assert trees_of(result.load_model()) == trees_of(expected)
    assert seen == [*range(1, 11)]
    # Inside of LightGBM, scores of other data sets are those of the trees too.
    measured = result.metrics
    assert measured[f"v-{objective}"] == pytest.approx(measured[f"train-{objective}"], rel=1e-12)


@pytest.mark.parametrize("objective", ["l1", "quantile"])
def test_leaves_of_lightgbm_dont_depend_on_where_rows_weigh_nothing(
    quiet: RunConfig, objective: str
) -> None:
    table = a_table(noisy, w=a_weightless_half())
    params = {"objective": objective, "num_leaves": 7}
    apart, mixed = (
        fit(quiet, rows, 0, backend="lightgbm", params=params, weight="w").load_model()
        for rows in (table, shuffled(table))
    )
    np.testing.assert_allclose(
        apart.predict(features_of(table)), mixed.predict(features_of(table)), rtol=1e-9
    )


@pytest.mark.sweep(one_in=2)
@pytest.mark.parametrize(
    ("backend", "params"),
    [
        ("xgboost", {"objective": "reg:absoluteerror", "max_depth": 3, "colsample_bytree": 0.7}),
        ("lightgbm", {"objective": "l1", "num_leaves": 7, "feature_fraction": 0.7}),
    ],
    ids=["xgboost", "lightgbm"],
)
def test_leaves_of_all_rows_are_the_same_everywhere(
    quiet: RunConfig, backend: str, params: dict[str, Any]
) -> None:
    table = a_table(noisy)
    validation = {"v": shuffled(table)}
    table = table.sort_by("y")
    same_everywhere(quiet, table, backend=backend, params=params, datasets=validation)


@pytest.mark.parametrize(
    ("backend", "params", "what"),
    [
        ("xgboost", {"objective": "reg:absoluteerror", "booster": "dart"}, "booster='dart'"),
        ("lightgbm", {"objective": "l1", "boosting": "dart"}, "with boosting"),
        ("lightgbm", {"objective": "l1", "reg_sqrt": True}, "with reg_sqrt"),
    ],
    ids=["dart of xgboost", "dart of lightgbm", "reg_sqrt"],
)
def test_leaves_that_the_workers_average_are_worth_a_warning(
    quiet: RunConfig,
    capfd: pytest.CaptureFixture[str],
    backend: str,
    params: dict[str, Any],
    what: str,
) -> None:
    result = fit(quiet, a_table(noisy), 2, backend=backend, params=params)
    assert result.error is None
    [line] = [line for line in capfd.readouterr().err.splitlines() if "averages the" in line]
    assert what in line


@pytest.mark.parametrize("backend", ["xgboost", "lightgbm"])
def test_a_metric_that_is_nan_is_reported_once(
    quiet: RunConfig, capfd: pytest.CaptureFixture[str], backend: str
) -> None:
    metric: Any = {
        "xgboost": {"custom_metric": lambda predictions, data: ("own", np.nan)},
        "lightgbm": {"feval": lambda predictions, data: ("own", np.nan, False)},
    }[backend]
    table = a_table(noisy)
    fit(quiet, table, 2, backend=backend, params={}, datasets={"v": table}, **metric)
    [line] = [line for line in capfd.readouterr().err.splitlines() if "NaN" in line]
    assert "round 1: 'train-own', 'v-own'" in line
