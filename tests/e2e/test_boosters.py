"""A booster is the same, to the last bit, at any number of workers, and whatever befell them."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xgboost
from tests.e2e.boosters import (
    BACKENDS,
    DRAWING,
    LOGISTIC,
    ROUNDS,
    ROWS,
    KillsAWorker,
    a_table,
    fit,
    model_of,
    shuffled,
    sorted_by_label,
    trained,
)
from tests.e2e.test_elastic import At, kill_an_agent
from tests.sweeps import only_in_sweep

import polytrain_lightgbm
import polytrain_xgboost
from polytrain import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from polytrain_lightgbm import LightGBM
from polytrain_xgboost import XGBoost, external

both = pytest.mark.parametrize("backend", BACKENDS)


@pytest.fixture(scope="module")
def table() -> pa.Table:
    return a_table()


def codes(table: pa.Table) -> tuple[list[str], np.ndarray[Any, Any]]:
    """The categories of the column "kind", and the number of each row's."""
    kinds = table.column("kind").to_pylist()
    values = sorted(set(kinds))
    return values, np.array([values.index(kind) for kind in kinds], np.int32)


def xgboost_by_itself(table: pa.Table, params: dict[str, Any], rounds: int = ROUNDS) -> bytes:
    """The model of XGBoost alone, on the same bins."""
    values, numbers = codes(table)
    categories = pa.DictionaryArray.from_arrays(pa.array(numbers), pa.array(values))
    features = table.set_column(table.schema.get_field_index("kind"), "kind", categories)
    matrix = xgboost.QuantileDMatrix(
        features.drop_columns(["y"]),
        label=table.column("y").to_numpy(),
        ref=polytrain_xgboost.bin_reference(table, XGBoost(params=params, label="y")),
        enable_categorical=True,
    )
    return bytes(xgboost.train(params, matrix, num_boost_round=rounds).save_raw())


def lightgbm_by_itself(table: pa.Table, params: dict[str, Any], rounds: int = ROUNDS) -> bytes:
    """The model of LightGBM alone, on the same bins, as its file."""
    backend = LightGBM(params=params, label="y")
    features = table.drop_columns(["y"]).to_pydict() | {"kind": codes(table)[1]}
    dataset = lightgbm.Dataset(
        np.column_stack(list(features.values())).astype(float),
        label=table.column("y").to_numpy(),
        feature_name=list(features),
        reference=polytrain_lightgbm.bin_reference(table, backend),
    )
    params = {**params, "verbosity": -1, "num_threads": 1}
    booster = lightgbm.train(params, dataset, num_boost_round=rounds)
    text = booster.model_to_string(num_iteration=-1)
    found = {"[verbosity: -1]": "[verbosity: 1]", "[num_threads: 1]": "[num_threads: 0]"}
    for ours, default in found.items():
        text = text.replace(ours, default)
    sample = f"[bin_construct_sample_cnt: {ROWS}]"
    return text.replace(sample, "[bin_construct_sample_cnt: 200000]").encode()


@pytest.mark.sweep(one_in=3)
@pytest.mark.parametrize("num_workers", [0, 1, 2, 4])
def test_the_model_is_that_of_xgboost_alone(
    quiet: RunConfig, table: pa.Table, num_workers: int
) -> None:
    params = LOGISTIC["xgboost"]
    assert trained(quiet, table, num_workers, backend="xgboost") == xgboost_by_itself(table, params)


@pytest.mark.sweep(one_in=3)
@pytest.mark.parametrize("num_workers", [0, 1, 2, 4])
@pytest.mark.parametrize(
    "params",
    [{"objective": "regression"}, {"objective": "huber", "boosting": "dart", "drop_rate": 0.5}],
    ids=["l2", "huber and dart"],
)
def test_the_model_is_that_of_lightgbm_alone(
    quiet: RunConfig, table: pa.Table, num_workers: int, params: dict[str, Any]
) -> None:
    ours = trained(quiet, table, num_workers, backend="lightgbm", params=params)
    assert ours == lightgbm_by_itself(table, params)


def test_several_of_lightgbms_machines_estimate_how_many_rows_a_leaf_has(
    quiet: RunConfig, table: pa.Table
) -> None:
    """The exception, as the docs have it: one that counts them ends in another model."""
    params = LOGISTIC["lightgbm"]
    ours = trained(quiet, table, 2, backend="lightgbm", params=params)
    assert trained(quiet, table, 1, backend="lightgbm", params=params) == ours
    assert lightgbm_by_itself(table, params) != ours


def losses(backend: str, **cases: dict[str, Any]) -> list[Any]:
    return [pytest.param(backend, params, id=f"{backend} {name}") for name, params in cases.items()]


@pytest.mark.sweep(one_in=3)
@pytest.mark.parametrize(
    ("backend", "params"),
    [
        *losses(
            "xgboost",
            drawing=DRAWING["xgboost"],
            dart={**LOGISTIC["xgboost"], "booster": "dart", "rate_drop": 0.3},
            forest={
                **LOGISTIC["xgboost"],
                **{"num_parallel_tree": 3, "subsample": 0.7, "colsample_bynode": 0.8},
            },
            lossguide={
                **LOGISTIC["xgboost"],
                **{"grow_policy": "lossguide", "max_leaves": 12, "max_depth": 0},
            },
            poisson={"objective": "count:poisson"},
            classes={"objective": "multi:softprob", "num_class": 2, "subsample": 0.5},
        ),
        *losses(
            "lightgbm",
            drawing=DRAWING["lightgbm"],
            classes={"objective": "multiclass", "num_class": 2},
            by_class={
                **LOGISTIC["lightgbm"],
                **{"pos_bagging_fraction": 0.9, "neg_bagging_fraction": 0.4, "bagging_freq": 1},
            },
            unbalanced={**LOGISTIC["lightgbm"], "is_unbalance": True, "boosting": "dart"},
            poisson={"objective": "poisson", "lambda_l1": 0.1, "path_smooth": 2.0},
        ),
    ],
)
def test_several_workers_draw_and_grow_what_one_does(
    quiet: RunConfig, table: pa.Table, backend: str, params: dict[str, Any]
) -> None:
    several = trained(quiet, table, 3, backend=backend, params=params)
    assert several == trained(quiet, table, 1, backend=backend, params=params)


def test_classes_of_few_weighted_rows_are_those_of_one_worker(quiet: RunConfig) -> None:
    """XGBoost begins with other scores where it has joined no collective."""
    generator = np.random.default_rng(0)
    columns = {f"x{number}": generator.random(15) for number in range(30)}
    few = pa.table(
        {**columns, "y": generator.integers(0, 3, 15), "w": generator.integers(0, 5, 15)}
    )
    params = {"objective": "multi:softprob", "num_class": 3}
    models = [
        trained(quiet, few, workers, backend="xgboost", params=params, weight="w")
        for workers in (1, 2)
    ]
    assert models[0] == models[1]


@pytest.mark.parametrize(
    ("backend", "params"),
    [
        *losses(
            "lightgbm",
            # LightGBM begins with it after 1 / learning_rate rounds.
            goss={**LOGISTIC["lightgbm"], "data_sample_strategy": "goss", "learning_rate": 0.5},
            forest={
                **LOGISTIC["lightgbm"],
                **{"boosting": "rf", "bagging_fraction": 0.5, "bagging_freq": 1},
            },
        ),
    ],
)
def test_what_the_frameworks_find_on_each_worker_depends_on_the_workers(
    quiet: RunConfig, table: pa.Table, backend: str, params: dict[str, Any]
) -> None:
    """The exceptions, as the docs have them: once a framework does without, they may say more."""
    other = trained(quiet, table.slice(1), 3, backend=backend, params=params)
    assert other != trained(quiet, table.slice(1), 2, backend=backend, params=params)


def with_queries(table: pa.Table) -> pa.Table:
    """Thirty rows each, some of which count more than others."""
    query = np.arange(ROWS) // 30
    return table.append_column("q", pa.array(query)).append_column(
        "w", pa.array(1.0 + np.sin(query) ** 2)
    )


@pytest.mark.sweep(one_in=2)
@pytest.mark.parametrize(
    ("drawn", "weight", "differs"),
    [(1, None, False), (1, "w", True), (0.5, None, True)],
    ids=["as they are", "weighted", "drawn"],
)
def test_queries_that_count_differently_are_scaled_on_each_worker(
    quiet: RunConfig, table: pa.Table, drawn: float, weight: str | None, differs: bool
) -> None:
    """An exception, as the docs have it; and what it is an exception to."""
    options: dict[str, Any] = {
        "backend": "xgboost",
        "params": {"objective": "rank:ndcg", "max_depth": 4, "subsample": drawn},
        "qid": "q",
        "weight": weight,
    }
    table = with_queries(table)
    if weight is None:
        table = table.drop_columns(["w"])
    two, three = (trained(quiet, table, workers, **options) for workers in (2, 3))
    assert (two != three) is differs


@pytest.mark.sweep
@pytest.mark.parametrize(
    "params",
    [
        {"lambdarank_unbiased": "true", "lambdarank_pair_method": "mean"},
        only_in_sweep({"lambdarank_unbiased": True}),
        only_in_sweep({"lambdarank_pair_method": "mean"}),
    ],
    ids=str,
)
def test_pairs_and_position_biases_are_each_workers_own_and_the_same_after_a_restart(
    quiet: RunConfig, table: pa.Table, params: dict[str, Any]
) -> None:
    """Exceptions, as the docs have them."""
    options: dict[str, Any] = {
        "backend": "xgboost",
        "params": {"objective": "rank:ndcg", "max_depth": 4, **params},
        "qid": "q",
        "callbacks": [xgboost.callback.LearningRateScheduler(lambda round_: 0.3 * 0.9**round_)],
    }
    table = with_queries(table).drop_columns(["w"])
    two, three = (fit(quiet, table, workers, **options) for workers in (2, 3))
    assert model_of(two) != model_of(three)
    first = fit(quiet, table, 2, **options, num_boost_round=4)
    rest = fit(quiet, table, 2, **options, restore_from=first.checkpoint)
    assert model_of(rest) == model_of(two)
    assert [*first.history, *rest.history] == two.history


def test_rows_on_disk_end_in_the_same_model(
    quiet: RunConfig, table: pa.Table, tmp_path: Path
) -> None:
    pq.write_table(table, tmp_path / "train.parquet", row_group_size=700)
    options: dict[str, Any] = {"backend": "xgboost", "params": DRAWING["xgboost"]}
    files: Any = str(tmp_path / "train.parquet")
    ours = trained(quiet, files, 3, external_memory=True, **options)
    assert ours == trained(quiet, table, 1, **options)


def test_of_rows_on_disk_nothing_is_left_behind(
    quiet: RunConfig, table: pa.Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pages of 500 rows."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(external, "_BYTES_AT_ONCE", 500 * 8 * table.num_columns)
    options: dict[str, Any] = {"backend": "xgboost", "params": DRAWING["xgboost"]}
    ours = trained(quiet, table, 0, external_memory=True, **options)
    assert ours == trained(quiet, table, 0, **options)
    assert [*tmp_path.glob("polytrain-*/*")] == []


@pytest.mark.sweep(one_in=3)
@both
@pytest.mark.parametrize("order", [sorted_by_label, shuffled])
def test_the_order_of_the_rows_makes_no_difference(
    quiet: RunConfig, table: pa.Table, order: Any, backend: str
) -> None:
    assert trained(quiet, order(table), 3, backend=backend) == trained(
        quiet, table, 2, backend=backend
    )


@pytest.mark.sweep(one_in=2)
@pytest.mark.parametrize(
    ("backend", "more"),
    [("xgboost", {}), ("lightgbm", {}), ("lightgbm", {"boosting": "dart"})],
    ids=["xgboost", "lightgbm", "lightgbm dart"],
)
def test_a_run_that_is_killed_ends_in_the_same_model(
    quiet: RunConfig, table: pa.Table, backend: str, more: dict[str, Any]
) -> None:
    """Between two checkpoints, too. Rounds of DART are done once more, and draw what they drew."""
    config = dataclasses.replace(
        quiet,
        # Both kills may come at one step, which without this would look like a bug of the user's.
        failure_config=FailureConfig(max_failures=2, retry_user_errors=True),
        checkpoint_config=CheckpointConfig(checkpoint_frequency=7),
        observers=(KillsAWorker(2),),
    )
    options: dict[str, Any] = {
        "backend": backend,
        "params": {**DRAWING[backend], **more},
        "num_boost_round": 60,
    }
    result = fit(config, table, 2, **options)
    undisturbed = fit(quiet, table, 2, **options)
    assert result.restarts == 2
    assert model_of(result) == model_of(undisturbed)
    assert result.history == undisturbed.history


def test_a_round_draws_the_same_though_its_seed_is_lightgbms_own(
    quiet: RunConfig, table: pa.Table
) -> None:
    """A new booster begins with LightGBM's own seed for columns, which is 2."""
    options: dict[str, Any] = {"backend": "lightgbm", "params": DRAWING["lightgbm"]}
    first = fit(quiet, table, 0, num_boost_round=2, **options).checkpoint
    resumed = fit(quiet, table, 0, num_boost_round=4, restore_from=first, **options)
    at_once = fit(quiet, table, 0, num_boost_round=4, **options)
    assert model_of(resumed) == model_of(at_once)


@pytest.mark.only_in_sweep
@pytest.mark.on_ray
@both
def test_a_run_that_loses_a_worker_and_gets_another_ends_in_the_same_model(
    quiet: RunConfig, table: pa.Table, backend: str
) -> None:
    """Three workers, then two, then three: an agent is killed, and replaced at a checkpoint.

    In `make test`, `test_elastic` has such runs, and the next test begins with other workers.
    """
    config = dataclasses.replace(
        quiet,
        failure_config=FailureConfig(max_failures=1),
        checkpoint_config=CheckpointConfig(checkpoint_frequency=7),
        observers=(At(4, kill_an_agent),),
    )
    options: dict[str, Any] = {
        "backend": backend,
        "params": DRAWING[backend],
        "num_boost_round": 60,
    }
    scaling = ScalingConfig(num_workers=(2, 3))
    result = fit(config, table, 3, scaling_config=scaling, **options)
    assert result.restarts > 0
    assert model_of(result) == trained(quiet, table, 1, **options)


@pytest.mark.sweep(one_in=2)
@both
def test_a_run_that_goes_on_with_others_ends_in_the_same_model(
    quiet: RunConfig, table: pa.Table, backend: str
) -> None:
    params = DRAWING[backend]
    first = fit(quiet, table, 3, backend=backend, num_boost_round=4, params=params).checkpoint
    second = trained(quiet, table, 2, backend=backend, restore_from=first, params=params)
    assert second == trained(quiet, table, 1, backend=backend, params=params)
