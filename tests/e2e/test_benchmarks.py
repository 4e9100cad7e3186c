"""The benchmarks run: ours alone, once, with no bound but the cost of a report."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.parametrize("name", ["startup", "report", "recovery"])
def test_quick(name: str) -> None:
    run = subprocess.run(
        [sys.executable, BENCHMARKS / f"bench_{name}.py", "--quick"],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "ours" in run.stdout
