"""A loss costs no round: the ranks that are left have the trees of the last one."""

from __future__ import annotations

import dataclasses
import os
import signal
from typing import Any

import numpy as np
import pytest
from tests.e2e.boosters import BACKENDS, DRAWING, a_table, fit, model_of
from tests.e2e.journals import journal

import polytrain
from polytrain import CheckpointConfig, FailureConfig, RunConfig

ROUNDS, PATIENCE = 30, 25


@dataclasses.dataclass
class Kills:
    """Kills a rank at a call, counted from 1, in the first attempt."""

    rank: int = -1
    call: int = 0
    calls: int = 0

    def __call__(self) -> None:
        self.calls += 1
        context = polytrain.get_context()
        me = context.get_attempt(), context.get_world_rank(), self.calls
        if me == (0, self.rank, self.call):
            os.kill(os.getpid(), signal.SIGKILL)


def options_of(backend: str, place: str, kills: Kills) -> dict[str, Any]:
    """The backend's options, with a kill in a round's objective or in its metric."""

    def objective(scores: Any, rows: Any) -> tuple[Any, Any]:
        if place == "objective":
            kills()
        chances = 1 / (1 + np.exp(-scores))
        return chances - rows.get_label(), chances * (1 - chances)

    def metric(scores: Any, rows: Any) -> Any:
        if place == "metric":
            kills()
        distance = float(np.abs(scores - rows.get_label()).mean(dtype=float))
        return ("distance", distance) if backend == "xgboost" else ("distance", distance, False)

    if backend == "xgboost":
        return {"params": DRAWING[backend], "obj": objective, "custom_metric": metric}
    return {"params": DRAWING[backend] | {"objective": objective}, "feval": metric}


DART = {"booster": "dart", "rate_drop": 0.3}
"""A round of it changes the weights of earlier trees."""


@pytest.mark.sweep(one_in=2)
@pytest.mark.parametrize(
    ("backend", "place", "rank", "params"),
    [
        *(
            (backend, place, rank, {})
            for backend in BACKENDS
            for place, rank in (("objective", 0), ("metric", 1))
        ),
        ("xgboost", "metric", 1, DART),
    ],
)
def test_no_round_is_repeated(
    quiet: RunConfig, backend: str, place: str, rank: int, params: dict[str, Any]
) -> None:
    """A peer waits inside a round, or has its trees and not its metrics."""
    table = a_table()
    shared: dict[str, Any] = {
        "backend": backend,
        "num_boost_round": ROUNDS,
        "datasets": {"valid": table.slice(0, 100)},
        "early_stopping_rounds": PATIENCE,
    }
    failing = dataclasses.replace(
        quiet, failure_config=FailureConfig(max_failures=1, retry_user_errors=True)
    )
    kills = Kills(rank=rank, call=13)
    options, calm = options_of(backend, place, kills), options_of(backend, place, Kills())
    for each in (options, calm):
        each["params"] = {**each["params"], **params}
    result = fit(failing, table, 2, **shared, **options)
    undisturbed = fit(quiet, table, 2, **shared, **calm)
    assert result.restarts == 1
    [asked] = journal(result.path, "SurvivorsAsked")
    assert asked["reason"] == ""
    [_, again] = journal(result.path, "Launched")
    assert again["step"] == asked["step"] == 12
    assert model_of(result) == model_of(undisturbed)
    assert result.history == undisturbed.history


@pytest.mark.sweep(one_in=2)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_worker_without_peers_continues_from_its_copy(quiet: RunConfig, backend: str) -> None:
    table = a_table()
    shared: dict[str, Any] = {"backend": backend, "num_boost_round": ROUNDS}
    failing = dataclasses.replace(
        quiet,
        failure_config=FailureConfig(max_failures=1),
        checkpoint_config=CheckpointConfig(memory=1),
    )
    kills = Kills(rank=0, call=13)
    result = fit(failing, table, 1, **shared, **options_of(backend, "metric", kills))
    undisturbed = fit(quiet, table, 1, **shared, **options_of(backend, "metric", Kills()))
    assert result.restarts == 1
    [_, again] = journal(result.path, "Launched")
    assert again["step"] > 1
    assert result.ledger.lost_steps == 0
    assert model_of(result) == model_of(undisturbed)
    assert result.history == undisturbed.history
