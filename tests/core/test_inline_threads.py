"""Inline runs in several threads of a process don't mix."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import polytrain
from polytrain import Result, RunConfig, ScalingConfig, make_trainer


def test_each_run_has_its_own_reports(tmp_path: Path) -> None:
    both_have_begun = threading.Barrier(2)
    steps = 1000  # so many that two runs that don't wait for each other overlap

    def train(config: dict[str, int]) -> None:
        for step in range(steps):
            polytrain.report({"run": config["run"], "step": step})

    def fit(number: int) -> Result:
        trainer = make_trainer(
            "reference",
            train,
            train_loop_config={"run": number},
            scaling_config=ScalingConfig(num_workers=0),
            run_config=RunConfig(name=f"run-{number}", storage_path=tmp_path, progress="none"),
        )
        both_have_begun.wait()
        return trainer.fit()

    with ThreadPoolExecutor(2) as threads:
        results = [*threads.map(fit, range(2))]
    for number, result in enumerate(results):
        assert result.history == [{"run": number, "step": step} for step in range(steps)]
