"""Four frameworks, two workers each, on real data; one worker is killed on the way.

Run it with `make demo`. Every run is compared with the same framework's own single-process run.
Most of each is the import of a framework, which uses one CPU. So TensorFlow's run, whose import is
the longest, trains in the background while the others do, and the single-process runs are on a
thread of their own.
"""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
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
    Trainer,
    make_trainer,
)

EPOCHS = 8
ROUNDS = 40
METRICS = {
    "xgboost": "valid-logloss",
    "lightgbm": "valid-binary_logloss",
    "torch": "accuracy",
    "tensorflow": "val_accuracy",
}
TWO_WORKERS = ScalingConfig(num_workers=2, cluster="local")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What the final table says of a run."""

    backend: str
    length: str
    metric: str
    value: float
    seconds: float
    restarts: int


def main() -> None:
    """Run everything, and print the table."""
    cancer = split(load_breast_cancer(as_frame=True).frame)
    digits = split(load_digits(as_frame=True).frame)
    trees = {"xgboost": {"objective": "binary:logistic"}, "lightgbm": {"objective": "binary"}}
    with tempfile.TemporaryDirectory() as storage, ThreadPoolExecutor(max_workers=1) as beside:
        alone = {
            "xgboost": beside.submit(xgboost_logloss, trees["xgboost"], ROUNDS, cancer),
            "lightgbm": beside.submit(lightgbm_logloss, trees["lightgbm"], ROUNDS, cancer),
            "torch": beside.submit(torch_accuracy, EPOCHS, digits),
            "tensorflow": beside.submit(keras_accuracy, EPOCHS, digits),
        }
        keras = with_function("tensorflow", train_keras, digits, storage).fit(wait=False)
        runs = [
            *(
                summary(backend, boosted(backend, params, cancer, storage).fit())
                for backend, params in trees.items()
            ),
            summary("torch", with_function("torch", train_torch, digits, storage, 1).fit()),
            summary("tensorflow", keras.result()),
        ]
        show(runs, alone)


def split(frame: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Three quarters of the rows to train on, the rest to evaluate on."""
    shuffled = frame.sample(frac=1, random_state=0)
    cut = len(shuffled) * 3 // 4
    return {"train": shuffled.iloc[:cut], "valid": shuffled.iloc[cut:]}


def boosted(
    backend: str, params: dict[str, Any], data: dict[str, pd.DataFrame], storage: str
) -> Trainer:
    """Trees need no training function."""
    return make_trainer(
        backend,
        params=params,
        num_boost_round=ROUNDS,
        label="target",
        datasets=data,
        scaling_config=TWO_WORKERS,
        run_config=RunConfig(name=backend, storage_path=storage),
    )


def with_function(
    backend: str,
    train_function: Callable[[dict[str, Any]], None],
    data: dict[str, pd.DataFrame],
    storage: str,
    kill_rank: int | None = None,
) -> Trainer:
    """Neural networks need a training function, which may kill a rank half-way."""
    return make_trainer(
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


def summary(backend: str, result: Result) -> Run:
    """The row of a finished run."""
    metric = METRICS[backend]
    boosts = metric.endswith("logloss")
    return Run(
        backend=backend,
        length=f"{len(result.history)} {'rounds' if boosts else 'epochs'}",
        metric="logloss" if boosts else "accuracy",
        value=result.metrics[metric],
        seconds=result.ledger.wall_s,
        restarts=result.restarts,
    )


def show(runs: list[Run], alone: dict[str, Future[float]]) -> None:
    """Print the table, once the runs in one process are done too."""
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
    for run in runs:
        table.add_row(
            run.backend,
            str(TWO_WORKERS.num_workers),
            run.length,
            run.metric,
            f"{run.value:.4f}",
            f"{alone[run.backend].result():.4f}",
            f"{run.seconds:.1f}",
            str(run.restarts),
        )
    Console().print(table)
    print("alone: the same framework in a single process. Accuracy is better up, logloss down.")
    print("seconds: of the whole run. TensorFlow's trains at the same time as the others.")


if __name__ == "__main__":
    os.chdir(Path(__file__).parent)
    main()
    # The interpreter would spend a second on looking for garbage in all imported frameworks.
    gc.freeze()
