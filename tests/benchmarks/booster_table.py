"""Prints the hashes of models of runs that should make no difference.

The hash is of the model's file, but for what LightGBM alone says of its parameters there: one
process is told some of them otherwise.
"""

from __future__ import annotations

import dataclasses
import hashlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import ray
from tests.e2e.boosters import (
    BACKENDS,
    DRAWING,
    LOGISTIC,
    KillsAWorker,
    a_table,
    fit,
    model_of,
    shuffled,
    sorted_by_label,
)
from tests.e2e.test_boosters import lightgbm_by_itself, xgboost_by_itself
from tests.e2e.test_elastic import At, kill_an_agent

from polytrain import CheckpointConfig, FailureConfig, Result, RunConfig, ScalingConfig

ROUNDS = 60
_PARAMETERS = b"\nparameters:"


def digest(result: Result, table: pa.Table) -> str:
    """The model's hash, and its log loss on the data that it was trained on."""
    label = table.column("y").to_numpy()
    chance = np.clip(result.predict(table), 1e-15, 1 - 1e-15)
    loss = -np.mean(np.where(label > 0, np.log(chance), np.log(1 - chance)))
    return f"{hashed(model_of(result))} {loss:.6f}"


def hashed(model: bytes) -> str:
    return f"`{hashlib.sha256(model.partition(_PARAMETERS)[0]).hexdigest()[:10]}`"


def runs(config: RunConfig) -> Iterator[tuple[str, Callable[..., Result]]]:
    """Runs by name; each takes the data, and the backend with its options."""
    table = a_table()

    def run(data: pa.Table, workers: Any, config: RunConfig = config) -> Callable[..., Result]:
        scaling = ScalingConfig(num_workers=workers)
        return lambda **options: fit(
            config, data, 0, scaling_config=scaling, num_boost_round=ROUNDS, **options
        )

    for workers in (0, 1, 2, 3, 4, 7):
        yield (
            (
                "in the calling process"
                if workers == 0
                else f"{workers} worker{'s' * (workers > 1)}"
            ),
            run(table, workers),
        )
    yield "3 workers, sorted by label", run(sorted_by_label(table), 3)
    yield "3 workers, shuffled", run(shuffled(table), 3)
    survives = dataclasses.replace(
        config,
        failure_config=FailureConfig(max_failures=2, retry_user_errors=True),
        checkpoint_config=CheckpointConfig(checkpoint_frequency=7),
    )
    yield (
        "2 workers, killed twice",
        lambda **options: run(
            table, 2, dataclasses.replace(survives, observers=(KillsAWorker(2),))
        )(**options),
    )
    yield (
        "3 workers, one lost during the run and replaced later",
        lambda **options: run(
            table, (2, 3), dataclasses.replace(survives, observers=(At(4, kill_an_agent),))
        )(**options),
    )


def main() -> None:
    """Print the table."""
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    columns = [
        (name, backend, params[backend])
        for backend in BACKENDS
        for name, params in ((backend, LOGISTIC), (f"{backend}, sampling", DRAWING))
    ]
    print(f"| | {' | '.join(name for name, *_ in columns)} |")
    print(f"|---{'|---' * len(columns)}|")
    alone = {
        "xgboost": xgboost_by_itself(a_table(), LOGISTIC["xgboost"], ROUNDS),
        "lightgbm": lightgbm_by_itself(a_table(), LOGISTIC["lightgbm"], ROUNDS),
    }
    cells = [hashed(alone[name]) if name in alone else "–" for name, *_ in columns]
    print(f"| the framework alone, on these bins | {' | '.join(cells)} |")
    with tempfile.TemporaryDirectory() as directory:
        config = RunConfig(storage_path=Path(directory), progress=False)
        for name, run in runs(config):
            cells = [
                digest(run(backend=backend, params=params), a_table())
                for _, backend, params in columns
            ]
            print(f"| {name} | {' | '.join(cells)} |", flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
