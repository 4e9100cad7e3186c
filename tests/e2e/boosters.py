"""Data, runs and mishaps that the tests of XGBoost and LightGBM share."""

from __future__ import annotations

import dataclasses
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa

from polytrain import (
    CheckpointConfig,
    FailureConfig,
    Result,
    RunConfig,
    ScalingConfig,
    get_context,
    make_trainer,
)
from polytrain.testing.processes import title
from polytrain_plugins import Report, hookimpl

ROWS, ROUNDS = 6000, 10
BACKENDS = ("xgboost", "lightgbm")

MANY_ROUNDS = 60
"""Enough for a trainer to be killed before they are over."""

LOGISTIC: dict[str, dict[str, Any]] = {
    "xgboost": {"objective": "binary:logistic", "max_depth": 4},
    "lightgbm": {"objective": "binary", "num_leaves": 12},
}
DRAWING = {
    "xgboost": {
        **LOGISTIC["xgboost"],
        **{"subsample": 0.7, "colsample_bytree": 0.6, "colsample_bynode": 0.8},
    },
    "lightgbm": {
        **LOGISTIC["lightgbm"],
        **{"bagging_fraction": 0.7, "bagging_freq": 2},
        **{"feature_fraction": 0.6, "feature_fraction_bynode": 0.8, "extra_trees": True},
    },
}
MODEL_FILES = {"xgboost": "model.ubj", "lightgbm": "model.txt"}


def a_table() -> pa.Table:
    """Numbers, strings with missing ones, and a label `y` of 0 and 1."""
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


def fit(
    quiet: RunConfig,
    table: pa.Table,
    num_workers: int,
    *,
    backend: str,
    datasets: dict[str, pa.Table] | None = None,
    **options: Any,
) -> Result:
    return make_trainer(
        backend,
        label="y",
        datasets={"train": table, **(datasets or {})},
        run_config=quiet,
        **{
            "params": LOGISTIC[backend],
            "num_boost_round": ROUNDS,
            "scaling_config": ScalingConfig(num_workers=num_workers),
            **options,
        },
    ).fit()


def trained(
    quiet: RunConfig, table: pa.Table, num_workers: int, *, backend: str, **options: Any
) -> bytes:
    """The model of a run, as bytes."""
    return model_of(fit(quiet, table, num_workers, backend=backend, **options))


def model_of(result: Result) -> bytes:
    assert result.checkpoint is not None
    [file] = (
        Path(result.checkpoint.path, name)
        for name in MODEL_FILES.values()
        if Path(result.checkpoint.path, name).exists()
    )
    return file.read_bytes()


class KillsAWorker:
    """Kills a worker process in each of the first attempts, at its first report."""

    def __init__(self, attempts: int) -> None:
        self._left = list(range(attempts))

    @hookimpl
    def polytrain_reported(self, report: Report) -> None:
        if report.attempt in self._left:
            self._left.remove(report.attempt)
            # All zygotes have the same title, and worker processes are their children.
            below = psutil.Process().children(recursive=True)
            zygotes = {p.pid for p in below if "polytrain.workers.processes.zygote" in title(p)}
            next(p for p in below if p.pid in zygotes and p.ppid() in zygotes).kill()


@dataclasses.dataclass
class DiesInLightGBM:
    """Rank 1 in its first attempt, after this round."""

    round: int

    def __call__(self, env: Any) -> None:
        dies_in_round(env.iteration + 1, self.round)


def dying(backend: str, round_: int) -> Any:
    """A callback that kills rank 1 in its first attempt, after this round."""
    if backend == "lightgbm":
        return DiesInLightGBM(round_)
    import xgboost

    class DiesInXGBoost(xgboost.callback.TrainingCallback):  # type: ignore[misc]  # it is Any here
        def after_iteration(self, model: Any, epoch: int, evals_log: Any) -> bool:
            dies_in_round(epoch + 1, round_)
            return False

    return DiesInXGBoost()


def dies_in_round(round_: int, chosen: int) -> None:
    context = get_context()
    if round_ == chosen and context.get_world_rank() == 1 and context.get_attempt() == 0:
        os.kill(os.getpid(), signal.SIGKILL)


def same_everywhere(quiet: RunConfig, table: pa.Table, **options: Any) -> bytes:
    """The model, which is the same inline, and by three workers and then two, one of which is
    killed. That one worker's is the inline model is shown by `test_boosters`."""
    first = fit(quiet, table, 3, num_boost_round=4, **options).checkpoint
    options["num_boost_round"] = MANY_ROUNDS
    killing = dataclasses.replace(
        quiet,
        failure_config=FailureConfig(max_failures=1),
        checkpoint_config=CheckpointConfig(checkpoint_frequency=7),
        observers=(KillsAWorker(1),),
    )
    result = fit(killing, table, 2, restore_from=first, **options)
    assert result.restarts == 1
    assert model_of(result) == trained(quiet, table, 0, **options)
    return model_of(result)
