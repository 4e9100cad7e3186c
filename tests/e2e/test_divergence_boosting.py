"""A boosting run that diverges goes back to a good round. No import of torch is in this file: each
worker process imports it, for the functions that users pass."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import xgboost
from tests.e2e import boosters
from tests.e2e.journals import journal

from polytrain import CheckpointConfig, FailureConfig, InvalidJobError, Rollback, RunConfig


def unstable(predictions: Any, rows: Any) -> tuple[Any, Any]:
    """A squared error that is too steep: with a rate of 1 predictions grow until they overflow."""
    label = rows.get_label()
    gradient = 3 * (predictions - label)
    overflows = np.abs(predictions).max() > 100
    return gradient * (1e36 if overflows else 1.0), np.ones(len(label))


def gentler(params: dict[str, Any], rollback: Rollback) -> dict[str, Any]:
    return {**params, "learning_rate": params["learning_rate"] / 4}


class RateOf1(xgboost.callback.TrainingCallback):  # type: ignore[misc]  # it is Any here
    """Sets the rate once, before the first round: it counts until the run itself changes it."""

    def before_iteration(self, model: Any, epoch: int, evals_log: Any) -> bool:
        if epoch == 0:
            model.set_param("learning_rate", 1.0)
        return False


def rate_of_1(env: Any) -> None:
    if env.iteration == 0:
        env.model.reset_parameter({"learning_rate": 1.0})


UNSTABLE: dict[str, dict[str, Any]] = {
    "xgboost": {
        "params": {"learning_rate": 0.9, "base_score": 0.0, "eval_metric": "rmse"},
        "obj": unstable,
        "callbacks": [RateOf1()],
    },
    "lightgbm": {
        "params": {"learning_rate": 0.9, "metric": "rmse", "objective": unstable},
        "callbacks": [rate_of_1],
    },
}


def explodes(history: list[dict[str, Any]]) -> bool:
    return bool(history[-1]["train-rmse"] > 50)


RULES = {"xgboost": None, "lightgbm": explodes}
"""XGBoost's predictions become infinite; LightGBM's don't, they are as far off as the rule says."""


@pytest.mark.parametrize("backend", boosters.BACKENDS)
def test_boosting_goes_back_and_continues_with_another_rate(quiet: RunConfig, backend: str) -> None:
    """As if somebody had gone back by hand, to the last checkpoint before the overflow."""
    options = {**UNSTABLE[backend], "num_boost_round": 14, "backend": backend}
    quiet = dataclasses.replace(quiet, checkpoint_config=CheckpointConfig(checkpoint_frequency=2))
    failures = FailureConfig(
        on_divergence="rollback", divergence=RULES[backend], on_rollback=gentler
    )
    result = boosters.fit(
        dataclasses.replace(quiet, failure_config=failures), boosters.a_table(), 2, **options
    )
    [rollback] = result.rollbacks
    assert rollback.skipped == {}
    [_, launched] = journal(result.path, "Launched")
    assert launched["step"] == rollback.good_step - rollback.good_step % 2 > 0
    assert result.metrics["train-rmse"] < 1
    by_hand = boosters.fit(
        quiet,
        boosters.a_table(),
        2,
        **{**options, "params": gentler(options["params"], rollback)},
        restore_from=launched["start"],
    )
    assert boosters.model_of(by_hand) == boosters.model_of(result)


@pytest.mark.parametrize("backend", boosters.BACKENDS)
def test_boosting_has_no_batches_to_leave_out(quiet: RunConfig, backend: str) -> None:
    quiet = dataclasses.replace(quiet, failure_config=FailureConfig(on_divergence="rollback"))
    with pytest.raises(InvalidJobError, match=r"each round is trained on all .*on_rollback"):
        boosters.fit(quiet, boosters.a_table(), 0, backend=backend)
