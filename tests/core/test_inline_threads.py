"""Inline runs in several threads of a process don't mix."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import polytrain
from polytrain import Result, RunConfig, ScalingConfig, Trainer, make_trainer
from polytrain.workers.driver import inline_group

trained: list[tuple[float, float]] = []
"""When each run began to train, and when it ended."""

has_begun = threading.Event()
may_end = threading.Event()


def trains(config: dict[str, Any]) -> None:
    began = time.monotonic()
    for step in range(config["steps"]):
        polytrain.report({"run": config["run"], "step": step})
    trained.append((began, time.monotonic()))


def waits(config: dict[str, Any]) -> None:
    has_begun.set()
    assert may_end.wait(60)


def trainer(function: Any, path: Path, **config: Any) -> Trainer:
    return make_trainer(
        "reference",
        function,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(name=f"run-{config['run']}", storage_path=path, progress="none"),
    )


def fits(config: dict[str, Any]) -> None:
    polytrain.report({"inner": None})
    result = trainer(trains, config["storage"], run="inner", steps=2).fit()
    polytrain.report({"inner": len(result.history)})
    assert polytrain.get_context().get_experiment_name() == "run-outer"


@pytest.fixture
def first_trains(tmp_path: Path) -> Iterator[None]:
    """Another thread's run trains until `may_end`."""
    has_begun.clear()
    may_end.clear()
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(trainer(waits, tmp_path, run="first").fit)
        try:
            assert has_begun.wait(60)
            yield
        finally:
            may_end.set()
        first.result()


def test_each_run_has_its_own_reports(tmp_path: Path) -> None:
    trained.clear()
    both_have_begun = threading.Barrier(2)
    steps = 1000  # so many that two runs that don't wait for each other overlap

    def fit(number: int) -> Result:
        made = trainer(trains, tmp_path, run=number, steps=steps)
        both_have_begun.wait()
        return made.fit()

    with ThreadPoolExecutor(2) as threads:
        results = [*threads.map(fit, range(2))]
    for number, result in enumerate(results):
        assert result.history == [{"run": number, "step": step} for step in range(steps)]
    (_, one_ended), (other_began, _) = sorted(trained)
    assert one_ended <= other_began


def test_a_training_function_may_make_a_run_of_its_own(tmp_path: Path) -> None:
    result = trainer(fits, tmp_path, run="outer", storage=tmp_path).fit()
    assert result.history == [{"inner": None}, {"inner": 2}]


def test_a_run_says_that_it_waits_for_another_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first_trains: None
) -> None:
    """A training function may start a thread with a run of its own, and wait for it for ever."""
    monkeypatch.setattr(inline_group, "_PATIENCE_S", 0.01)
    was_said = threading.Event()

    class Log(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "waits for another thread" in record.getMessage():
                was_said.set()

    log = Log()
    inline_group.logger.addHandler(log)
    try:
        second = trainer(trains, tmp_path, run="second", steps=2).fit(wait=False)
        assert was_said.wait(60)
    finally:
        inline_group.logger.removeHandler(log)
    may_end.set()
    assert len(second.result().history) == 2


def test_a_run_that_waits_for_another_thread_can_be_stopped(
    tmp_path: Path, first_trains: None
) -> None:
    second = trainer(trains, tmp_path, run="second", steps=2).fit(wait=False)
    second.stop()
    assert second.result(timeout=60).history == []
    assert not may_end.is_set()
