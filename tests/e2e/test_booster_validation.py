"""Boosters that train from options alone have each saved model validated beside training."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polytrain import (
    Checkpoint,
    CheckpointConfig,
    Result,
    RunConfig,
    ScalingConfig,
    ValidationConfig,
    make_trainer,
)

ROUNDS, EVERY = 6, 2


def rows(seed: int) -> dict[str, np.ndarray[Any, Any]]:
    random = np.random.default_rng(seed)
    features = random.normal(size=(200, 3))
    label = features @ [1.0, -2.0, 0.5] + random.normal(scale=0.1, size=200)
    return {**{f"x{column}": features[:, column] for column in range(3)}, "y": label}


def features_of(table: dict[str, np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    return np.column_stack([table[f"x{column}"] for column in range(3)])


def error(predicted: np.ndarray[Any, Any], table: dict[str, np.ndarray[Any, Any]]) -> float:
    return float(np.sqrt(np.mean((predicted - table["y"]) ** 2)))


def validate_xgboost(checkpoint: Checkpoint) -> dict[str, Any]:
    import xgboost

    with checkpoint.as_directory() as directory:
        booster = xgboost.Booster(model_file=Path(directory, "model.ubj"))
    matrix = xgboost.DMatrix(features_of(rows(1)), feature_names=booster.feature_names)
    return {"held_out": error(booster.predict(matrix), rows(1))}


def validate_lightgbm(checkpoint: Checkpoint) -> dict[str, Any]:
    import lightgbm

    with checkpoint.as_directory() as directory:
        booster = lightgbm.Booster(model_file=Path(directory, "model.txt"))
    return {"held_out": error(np.asarray(booster.predict(features_of(rows(1)))), rows(1))}


VALIDATES = {"xgboost": validate_xgboost, "lightgbm": validate_lightgbm}
OPTIONS: dict[str, dict[str, Any]] = {
    "xgboost": {"params": {"objective": "reg:squarederror", "max_depth": 3}},
    "lightgbm": {"params": {"objective": "regression", "num_leaves": 7}},
}


@pytest.mark.parametrize("backend", VALIDATES)
def test_each_saved_model_is_validated(quiet: RunConfig, backend: str) -> None:
    checkpoints = CheckpointConfig(
        checkpoint_frequency=EVERY,
        num_to_keep=1,
        checkpoint_score_attribute="held_out",
        checkpoint_score_order="min",
    )
    result: Result = make_trainer(
        backend,
        label="y",
        num_boost_round=ROUNDS,
        datasets={"train": rows(0)},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=dataclasses.replace(quiet, checkpoint_config=checkpoints),
        validation_config=ValidationConfig(fn=VALIDATES[backend]),
        **OPTIONS[backend],
    ).fit()
    # The history has them at the rounds that were saved, and at no other.
    rounds = [n for n, metrics in enumerate(result.history, start=1) if "held_out" in metrics]
    assert rounds == list(range(EVERY, ROUNDS + 1, EVERY))
    held_out = [metrics["held_out"] for metrics in result.history if "held_out" in metrics]
    assert held_out == sorted(held_out, reverse=True)
    # The same number as the model that the run returns has in this process.
    assert result.checkpoint is not None
    assert VALIDATES[backend](result.checkpoint)["held_out"] == pytest.approx(
        result.metrics["held_out"], rel=1e-6
    )
    assert result.best_checkpoints[0][1]["held_out"] == min(held_out)
