"""How many rounds of boosters random kills cost: none, if a survivor has the last one's trees.

One worker process of two is killed at a random moment in each attempt, again and again. At the end
the model and the metrics have to be those of a run without a kill, to the last bit.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa

from polytrain import FailureConfig, Result, RunConfig, ScalingConfig, make_trainer
from polytrain.testing.processes import title
from polytrain_plugins import Report, hookimpl

PARAMS: dict[str, dict[str, Any]] = {
    "xgboost": {
        "objective": "binary:logistic",
        "max_depth": 4,
        "subsample": 0.7,
        "colsample_bynode": 0.8,
    },
    "lightgbm": {
        "objective": "binary",
        "num_leaves": 12,
        "bagging_fraction": 0.7,
        "bagging_freq": 2,
        "feature_fraction_bynode": 0.8,
    },
}
FILES = {"xgboost": "model.ubj", "lightgbm": "model.txt"}


class Killer:
    """Kills one worker process in each attempt, after a random number of reports."""

    def __init__(self, kills: int, seed: int, longest_s: float) -> None:
        self.left, self.longest_s = kills, longest_s
        self.random = random.Random(seed)
        self.attempt = -1

    @hookimpl
    def polytrain_reported(self, report: Report) -> None:
        if report.attempt == self.attempt or not self.left or self.random.random() < 0.6:
            return
        self.attempt = report.attempt
        self.left -= 1
        which, delay_s = self.random.random(), self.random.random() * self.longest_s
        threading.Thread(target=self._kill, args=(which, delay_s), daemon=True).start()

    def _kill(self, which: float, delay_s: float) -> None:
        time.sleep(delay_s)
        # All zygotes have the same title, and worker processes are their children.
        below = psutil.Process().children(recursive=True)
        zygotes = {p.pid for p in below if "polytrain.workers.processes.zygote" in title(p)}
        workers = [p for p in below if p.pid in zygotes and p.ppid() in zygotes]
        if workers:
            workers[int(which * len(workers))].kill()


def a_table(rows: int) -> pa.Table:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(rows, 6))
    y = x[:, 0] + x[:, 1] * x[:, 2] + generator.normal(size=rows) > 0.5
    return pa.table({**{f"x{i}": x[:, i] for i in range(6)}, "y": y * 1.0})


def fit(backend: str, table: pa.Table, rounds: int, directory: Path, *killer: Killer) -> Result:
    return make_trainer(
        backend,
        label="y",
        params=PARAMS[backend],
        num_boost_round=rounds,
        early_stopping_rounds=rounds,
        datasets={"train": table, "valid": table.slice(0, len(table) // 10)},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            storage_path=directory,
            progress=False,
            failure_config=FailureConfig(max_failures=-1, retry_user_errors=True),
            observers=killer,
        ),
    ).fit()


def model_of(result: Result, backend: str) -> bytes:
    assert result.checkpoint is not None
    return Path(result.checkpoint.path, FILES[backend]).read_bytes()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--backends", default="xgboost,lightgbm")
    parser.add_argument("--rows", type=int, default=6000)
    parser.add_argument("--longest-s", type=float, default=0.03)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    table = a_table(arguments.rows)
    # Some rounds pass in each attempt before the kill, and while the processes are looked for.
    rounds = arguments.kills * 24 + 20
    for backend in arguments.backends.split(","):
        with tempfile.TemporaryDirectory() as there:
            expected = fit(backend, table, rounds, Path(there))
            killer = Killer(arguments.kills, arguments.seed, arguments.longest_s)
            result = fit(backend, table, rounds, Path(there), killer)
            is_equal = model_of(result, backend) == model_of(expected, backend)
            has_all = result.history == expected.history
            print(
                f"{backend}: {result.restarts} kills, {result.ledger.lost_steps} rounds lost; "
                f"model {'equal' if is_equal else 'DIFFERS'}, "
                f"metrics {'equal' if has_all else 'DIFFER'}"
            )
            for line in Path(result.path, "journal.jsonl").read_text().splitlines():
                entry = json.loads(line)
                if entry["event"] == "SurvivorsAsked" and entry["reason"]:
                    print(f"  after attempt {entry['attempt']}: {entry['reason']}")


if __name__ == "__main__":
    main()
