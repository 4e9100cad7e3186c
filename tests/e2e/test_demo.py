"""`make demo`, as it is shown to everybody."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def shown() -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, EXAMPLES / "demo.py"], capture_output=True, text=True, timeout=240
    )


def test_table(shown: subprocess.CompletedProcess[str]) -> None:
    """Every backend's run is about as good as its framework's own, and one was restarted."""
    assert shown.returncode == 0, shown.stderr
    table = shown.stdout.split("restarts")[1].split("alone:")[0]
    rows = [re.split(r"  +", line.strip()) for line in table.splitlines() if re.search(r"\d", line)]
    assert [row[0] for row in rows] == ["xgboost", "lightgbm", "torch", "tensorflow"]
    assert [row[7] for row in rows] == ["0", "0", "1", "0"]
    for _, workers, length, _, distributed, single, seconds, _ in rows:
        assert workers == "2"
        assert re.fullmatch(r"(40 rounds|8 epochs)", length)
        assert float(distributed) == pytest.approx(float(single), abs=0.05)
        assert float(seconds) > 0


def test_quiet_otherwise(shown: subprocess.CompletedProcess[str]) -> None:
    """What isn't the table is a line of the run's own progress."""
    lines = [line for line in shown.stderr.splitlines() if line.strip()]
    ends = r"step \d+: |checkpoint of step \d+: |more: polytrain show "
    known = rf"(xgboost|lightgbm|torch|tensorflow): |  ({ends})"
    assert [line for line in lines if not re.match(known, line)] == []
    assert not [line for line in shown.stdout.splitlines() if "rank" in line]
