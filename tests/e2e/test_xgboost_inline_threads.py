"""Inline runs of XGBoost in several threads leave their process as it was."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from polytrain import Result, RunConfig, ScalingConfig, make_trainer


def test_the_program_still_prints_after_runs_in_threads(tmp_path: Path) -> None:
    stdout, column = sys.stdout, np.arange(50.0)

    def fit(number: int) -> Result:
        return make_trainer(
            "xgboost",
            num_boost_round=2,
            label="y",
            datasets={"train": {"x": column, "y": column}},
            scaling_config=ScalingConfig(num_workers=0),
            run_config=RunConfig(name=f"run-{number}", storage_path=tmp_path, progress="none"),
        ).fit()

    with ThreadPoolExecutor(3) as threads:
        results = [*threads.map(fit, range(12))]
    assert all(result.finished for result in results)
    assert sys.stdout is stdout
