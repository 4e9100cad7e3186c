"""A run whose machine's clock is set, or which is suspended: only a whole run has every reader of
the time."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import polytrain
from polytrain import Result, RunConfig, ScalingConfig, make_trainer
from polytrain_plugins import Report, RunInfo, hookimpl

DAY, STEPS, JUMPS_AT = 86_400.0, 12, 4


class SetsClock:
    """Sets this process's wall clock, the driver's, once rank 0 has made a report."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, by_s: float, flag: Path) -> None:
        self._real, self._by_s, self._flag = time.time, by_s, flag
        self._monkeypatch = monkeypatch

    @hookimpl
    def polytrain_reported(self, run: RunInfo, report: Report) -> None:
        if report.step == JUMPS_AT:
            self._monkeypatch.setattr(time, "time", lambda: self._real() + self._by_s)
            self._flag.touch()


def waits_for_the_jump(config: dict[str, Any]) -> None:
    for step in range(1, STEPS + 1):
        polytrain.report({"loss": 1 / step})
        while step == JUMPS_AT and not config["flag"].exists():
            time.sleep(0.01)


@pytest.fixture(params=[DAY, -DAY], ids=["forward", "back"])
def run_with_jump(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], Result]:
    def run() -> Result:
        flag = tmp_path / "flag"
        return make_trainer(
            "reference",
            waits_for_the_jump,
            train_loop_config={"flag": flag},
            scaling_config=ScalingConfig(num_workers=1),
            run_config=RunConfig(
                name="run",
                storage_path=str(tmp_path),
                progress="none",
                time_budget_s=3600,
                observers=(SetsClock(monkeypatch, request.param, flag),),
            ),
        ).fit()

    return run


def test_a_clock_that_is_set_ends_no_run_and_no_account_has_the_jump(
    run_with_jump: Callable[[], Result], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    called = time.monotonic()
    result = run_with_jump()
    took = time.monotonic() - called
    assert (result.finished, result.stopped) == (True, None)
    assert len(result.history) == STEPS
    assert 0 < result.ledger.wall_s <= took
    lines = [json.loads(line) for line in (tmp_path / "run/journal.jsonl").open()]
    times = [line["time"] for line in lines]
    assert times == sorted(times)
    assert times[-1] - times[0] <= took
    by_s = {"forward": DAY, "back": -DAY}[request.node.callspec.id]
    changes = [line["by_s"] for line in lines if line["event"] == "ClockChanged"]
    assert changes == [pytest.approx(by_s, abs=60)]
