"""Training functions that call the frameworks' own `train` on their shards."""

from __future__ import annotations

import dataclasses
from typing import Any

import lightgbm
import numpy as np
import pytest
import xgboost
from tests.e2e.boosters import BACKENDS, KillsAWorker, a_table, fit
from tests.e2e.journals import journal

import polytrain
from polytrain import (
    FailureConfig,
    RunConfig,
    ScalingConfig,
    TrainingFailedError,
    make_trainer,
)

ROUNDS = 150


def with_xgboost(config: dict[str, Any]) -> None:
    from polytrain_xgboost.reporting import ReportCallback, checkpointed_model

    table = polytrain.get_dataset_shard("train").to_arrow().drop_columns(["kind"])
    rows = xgboost.DMatrix(table.drop_columns(["y"]), label=table["y"].to_numpy())
    model = checkpointed_model()
    done = 0 if model is None else model.num_boosted_rounds()
    xgboost.train(
        {"objective": "binary:logistic", "nthread": 1},
        rows,
        num_boost_round=config["rounds"] - done,
        evals=[(rows, "train")],
        xgb_model=model,
        callbacks=[ReportCallback(checkpoint_frequency=config["saves_every"])],
        verbose_eval=False,
    )


def with_lightgbm(config: dict[str, Any]) -> None:
    from polytrain_lightgbm import network_params
    from polytrain_lightgbm.reporting import ReportCallback, checkpointed_model

    table = polytrain.get_dataset_shard("train").to_arrow().drop_columns(["kind"])
    features = np.column_stack([column.to_numpy() for column in table.columns[:-1]])
    rows = lightgbm.Dataset(features, label=table["y"].to_numpy())
    model = checkpointed_model()
    done = 0 if model is None else model.num_trees()
    lightgbm.train(
        {"objective": "binary", "num_threads": 1, "verbosity": -1, **network_params()},
        rows,
        num_boost_round=config["rounds"] - done,
        valid_sets=[rows],
        valid_names=["train"],
        init_model=model,
        callbacks=[ReportCallback(checkpoint_frequency=config["saves_every"])],
    )


MODEL_OPTION = {"xgboost": "xgb_model", "lightgbm": "init_model"}
FUNCTIONS = {"xgboost": with_xgboost, "lightgbm": with_lightgbm}


@pytest.mark.parametrize("backend", BACKENDS)
def test_rounds_are_reported_and_saved_and_gone_on_with(quiet: RunConfig, backend: str) -> None:
    config = dataclasses.replace(
        quiet, failure_config=FailureConfig(max_failures=1), observers=(KillsAWorker(1),)
    )
    result = make_trainer(
        backend,
        FUNCTIONS[backend],
        train_loop_config={"rounds": ROUNDS, "saves_every": 4},
        datasets={"train": a_table()},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=config,
    ).fit()
    assert result.restarts == 1
    losses = [next(iter(metrics.values())) for metrics in result.history]
    assert len(losses) == ROUNDS
    assert losses == sorted(losses, reverse=True)
    model = result.load_model()
    rounds = {"xgboost": "num_boosted_rounds", "lightgbm": "num_trees"}[backend]
    assert getattr(model, rounds)() == ROUNDS
    with pytest.raises(
        TrainingFailedError, match=f"Continue its model by {MODEL_OPTION[backend]}="
    ):
        fit(quiet, a_table(), 0, backend=backend, restore_from=result.checkpoint)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_model_is_saved_when_the_run_asks_for_it(
    quiet: RunConfig, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = iter([False, True, False])
    monkeypatch.setattr(polytrain, "checkpoint_requested", lambda: next(asked))
    result = make_trainer(
        backend,
        FUNCTIONS[backend],
        train_loop_config={"rounds": 4, "saves_every": 0},
        datasets={"train": a_table()},
        scaling_config=ScalingConfig(num_workers=0),
        run_config=quiet,
    ).fit()
    assert [each["step"] for each in journal(result.path, "Committed")] == [2, 4]
