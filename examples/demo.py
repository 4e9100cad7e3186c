"""Four frameworks, two workers each, on real data; one worker is killed on the way.

Run it with `make demo`. Every run is compared with the same framework's own single-process run.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Before the first import of TensorFlow, whose C++ code logs messages by default.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
# Let two workers share one CPU if the machine has only one.
os.environ.setdefault("POLYTRAIN_LOCAL_CPUS", "2")

import pandas as pd
from rich import box
from rich.console import Console
from rich.table import Table
from single_process import keras_accuracy, lightgbm_logloss, torch_accuracy, xgboost_logloss
from sklearn.datasets import load_breast_cancer, load_digits
from training_functions import train_keras, train_torch

from polytrain import (
    CheckpointConfig,
    FailureConfig,
    Result,
    RunConfig,
    ScalingConfig,
    make_trainer,
)

EPOCHS = 8
ROUNDS = 40
TWO_WORKERS = ScalingConfig(num_workers=2, cluster="local")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the final table."""

    backend: str
    length: str
    metric: str
    distributed: float
    single: float
    seconds: float
    restarts: int


def main() -> None:
    """Run everything, and print the table."""
    cancer = split(load_breast_cancer(as_frame=True).frame)
    digits = split(load_digits(as_frame=True).frame)
    with tempfile.TemporaryDirectory() as storage:
        rows = [
            boosted("xgboost", {"objective": "binary:logistic"}, cancer, storage),
            boosted("lightgbm", {"objective": "binary"}, cancer, storage),
            with_function("torch", train_torch, torch_accuracy, digits, storage, kill_rank=1),
            with_function("tensorflow", train_keras, keras_accuracy, digits, storage),
        ]
    show(rows)


def split(frame: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Three quarters of the rows to train on, the rest to evaluate on."""
    shuffled = frame.sample(frac=1, random_state=0)
    cut = len(shuffled) * 3 // 4
    return {"train": shuffled.iloc[:cut], "valid": shuffled.iloc[cut:]}


def boosted(
    backend: str, params: dict[str, Any], data: dict[str, pd.DataFrame], storage: str
) -> Row:
    """Trees need no training function."""
    trainer = make_trainer(
        backend,
        params=params,
        num_boost_round=ROUNDS,
        label="target",
        datasets=data,
        scaling_config=TWO_WORKERS,
        run_config=RunConfig(name=backend, storage_path=storage),
    )
    result, seconds = timed(trainer.fit)
    metric = next(name for name in result.metrics if name.startswith("valid"))
    single = {"xgboost": xgboost_logloss, "lightgbm": lightgbm_logloss}[backend]
    return Row(
        backend=backend,
        length=f"{len(result.history)} rounds",
        metric="logloss",
        distributed=result.metrics[metric],
        single=single(params, ROUNDS, data),
        seconds=seconds,
        restarts=result.restarts,
    )


def with_function(
    backend: str,
    train_function: Callable[[dict[str, Any]], None],
    single: Callable[[int, dict[str, pd.DataFrame]], float],
    data: dict[str, pd.DataFrame],
    storage: str,
    *,
    kill_rank: int | None = None,
) -> Row:
    """Neural networks need a training function, which may kill a rank half-way."""
    trainer = make_trainer(
        backend,
        train_function,
        train_loop_config={"epochs": EPOCHS, "kill_rank": kill_rank},
        datasets=data,
        scaling_config=TWO_WORKERS,
        run_config=RunConfig(
            name=backend,
            storage_path=storage,
            failure_config=FailureConfig(max_failures=1),
            checkpoint_config=CheckpointConfig(num_to_keep=1),
        ),
    )
    result, seconds = timed(trainer.fit)
    return Row(
        backend=backend,
        length=f"{len(result.history)} epochs",
        metric="accuracy",
        distributed=result.metrics["accuracy"],
        single=single(EPOCHS, data),
        seconds=seconds,
        restarts=result.restarts,
    )


def timed(fit: Callable[[], Result]) -> tuple[Result, float]:
    """A result, and the wall seconds that it took."""
    started = time.perf_counter()
    result = fit()
    return result, time.perf_counter() - started


def show(rows: list[Row]) -> None:
    """Print the table."""
    table = Table(
        title="scikit-learn's breast cancer (trees) and digits (networks)",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )
    for column in ("backend", "workers", "length", "metric"):
        table.add_column(column)
    for column in ("together", "alone", "seconds", "restarts"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            row.backend,
            str(TWO_WORKERS.num_workers),
            row.length,
            row.metric,
            f"{row.distributed:.4f}",
            f"{row.single:.4f}",
            f"{row.seconds:.1f}",
            str(row.restarts),
        )
    Console().print(table)
    print("alone: the same framework in a single process. Accuracy is better up, logloss down.")


if __name__ == "__main__":
    os.chdir(Path(__file__).parent)
    main()
