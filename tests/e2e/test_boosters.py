"""A booster is the same, to the last bit, at any number of workers, and whatever befell them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pytest
import xgboost

from polytrain import (
    CheckpointConfig,
    FailureConfig,
    Result,
    RunConfig,
    ScalingConfig,
    make_trainer,
)
from polytrain.testing.processes import title
from polytrain_plugins import Report, hookimpl
from polytrain_xgboost import XGBoost, bin_reference

ROWS, ROUNDS = 6000, 10
LOGISTIC = {"objective": "binary:logistic", "max_depth": 4}
DRAWING = {**LOGISTIC, "subsample": 0.7, "colsample_bytree": 0.6, "colsample_bynode": 0.8}


@pytest.fixture(scope="module")
def table() -> pa.Table:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(ROWS, 5))
    kind = generator.integers(0, 6, ROWS)
    score = x[:, 0] + x[:, 1] * x[:, 2] + 0.7 * (kind % 3) + generator.normal(size=ROWS)
    columns = {f"x{i}": x[:, i] for i in range(5)}
    return pa.table({**columns, "kind": np.array(list("abcdef"))[kind], "y": (score > 0.5) * 1.0})


def sorted_by_label(table: pa.Table) -> pa.Table:
    return table.sort_by("y")


def shuffled(table: pa.Table) -> pa.Table:
    return table.take(pa.array(np.random.default_rng(1).permutation(ROWS)))


def trained(quiet: RunConfig, table: pa.Table, num_workers: int, **options: Any) -> bytes:
    """The model of a run, as bytes."""
    return model_of(fit(quiet, table, num_workers, **options))


def model_of(result: Result) -> bytes:
    assert result.checkpoint is not None
    return Path(result.checkpoint.path, "model.ubj").read_bytes()


def fit(quiet: RunConfig, table: pa.Table, num_workers: int, **options: Any) -> Result:
    return make_trainer(
        "xgboost",
        label="y",
        datasets={"train": table},
        scaling_config=ScalingConfig(num_workers=num_workers),
        run_config=quiet,
        **{"params": LOGISTIC, "num_boost_round": ROUNDS, **options},
    ).fit()


def by_itself(table: pa.Table, params: dict[str, Any]) -> bytes:
    """The model of XGBoost alone, on the same bins."""
    kinds = table.column("kind").to_pylist()
    values = sorted(set(kinds))
    codes = pa.array([values.index(kind) for kind in kinds], pa.int32())
    categories = pa.DictionaryArray.from_arrays(codes, pa.array(values))
    features = table.set_column(table.schema.get_field_index("kind"), "kind", categories)
    matrix = xgboost.QuantileDMatrix(
        features.drop_columns(["y"]),
        label=table.column("y").to_numpy(),
        ref=bin_reference(table, XGBoost(params=params, label="y")),
        enable_categorical=True,
    )
    return bytes(xgboost.train(params, matrix, num_boost_round=ROUNDS).save_raw())


@pytest.mark.parametrize("num_workers", [0, 1, 2, 4])
def test_the_model_is_that_of_one_process(
    quiet: RunConfig, table: pa.Table, num_workers: int
) -> None:
    assert trained(quiet, table, num_workers) == by_itself(table, LOGISTIC)


@pytest.mark.parametrize(
    "params",
    [
        DRAWING,
        {**LOGISTIC, "booster": "dart", "rate_drop": 0.3},
        {**LOGISTIC, "num_parallel_tree": 3, "subsample": 0.7, "colsample_bynode": 0.8},
        {**LOGISTIC, "grow_policy": "lossguide", "max_leaves": 12, "max_depth": 0},
        {"objective": "count:poisson"},
    ],
    ids=["drawing", "dart", "forest", "lossguide", "poisson"],
)
def test_several_workers_draw_and_grow_what_one_does(
    quiet: RunConfig, table: pa.Table, params: dict[str, Any]
) -> None:
    assert trained(quiet, table, 3, params=params) == trained(quiet, table, 1, params=params)


def test_medians_of_leaves_depend_on_the_workers(quiet: RunConfig, table: pa.Table) -> None:
    """The exception, as the docs have it: once XGBoost does without, they may say more."""
    params = {"objective": "reg:absoluteerror"}
    assert trained(quiet, table, 2, params=params) != trained(quiet, table, 1, params=params)


@pytest.mark.parametrize("order", [sorted_by_label, shuffled])
def test_the_order_of_the_rows_makes_no_difference(
    quiet: RunConfig, table: pa.Table, order: Any
) -> None:
    assert trained(quiet, order(table), 3) == by_itself(table, LOGISTIC)


class KillsATrainer:
    """Kills one in each of the first generations, at its first report."""

    def __init__(self, generations: int) -> None:
        self._left = list(range(generations))

    @hookimpl
    def polytrain_reported(self, report: Report) -> None:
        if report.generation in self._left:
            self._left.remove(report.generation)
            # Zygotes are all called the same, and trainers are their children.
            below = psutil.Process().children(recursive=True)
            zygotes = {p.pid for p in below if "polytrain.workers.zygote" in title(p)}
            next(p for p in below if p.pid in zygotes and p.ppid() in zygotes).kill()


def test_a_run_that_is_killed_ends_in_the_same_model(quiet: RunConfig, table: pa.Table) -> None:
    """Between two checkpoints, too: rounds are done once more, and draw what they drew."""
    config = dataclasses.replace(
        quiet,
        failure_config=FailureConfig(max_failures=2),
        checkpoint_config=CheckpointConfig(checkpoint_frequency=7),
        observers=(KillsATrainer(2),),
    )
    result = fit(config, table, 2, params=DRAWING, num_boost_round=60)
    assert result.restarts == 2
    assert model_of(result) == trained(quiet, table, 2, params=DRAWING, num_boost_round=60)


def test_a_run_that_goes_on_with_others_ends_in_the_same_model(
    quiet: RunConfig, table: pa.Table
) -> None:
    first = fit(quiet, table, 3, num_boost_round=4, params=DRAWING).checkpoint
    second = trained(quiet, table, 2, restore_from=first, params=DRAWING)
    assert second == trained(quiet, table, 1, params=DRAWING)
