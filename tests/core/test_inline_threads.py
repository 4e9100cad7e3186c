"""Inline runs in several threads of a process don't mix."""

from __future__ import annotations

import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import polytrain
from polytrain import Result, RunConfig, ScalingConfig, make_trainer
from polytrain.workers.driver import inline_group


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


def test_a_run_says_that_it_waits_for_another_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training function may start a thread with a run of its own, and wait for it for ever."""
    monkeypatch.setattr(inline_group, "_PATIENCE_S", 0.01)
    is_said = threading.Event()
    begun, end = tmp_path / "begun", tmp_path / "end"
    for pipe in (begun, end):
        os.mkfifo(pipe)

    class Log(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "waits for another thread" in record.getMessage():
                is_said.set()

    def train(config: dict[str, bool]) -> None:
        # To open a pipe is to wait until its other end is open.
        if config["is_first"]:
            begun.open("w").close()
            end.open().close()

    def fit(is_first: bool) -> Result:
        return make_trainer(
            "reference",
            train,
            train_loop_config={"is_first": is_first},
            scaling_config=ScalingConfig(num_workers=0),
            run_config=RunConfig(name=f"run-{is_first}", storage_path=tmp_path, progress="none"),
        ).fit()

    log = Log()
    inline_group.logger.addHandler(log)
    try:
        with ThreadPoolExecutor(2) as threads:
            first = threads.submit(fit, True)
            begun.open().close()
            second = threads.submit(fit, False)
            was_said = is_said.wait(60)
            end.open("w").close()
            first.result()
            second.result()
        assert was_said
    finally:
        inline_group.logger.removeHandler(log)
