"""Runs are killed at any line, and go on: a sample of what `make crash` tries in full."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.sweeps import only_in_sweep

ROOT = Path(__file__).parents[2]


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("inline", "scenarios", "in_bucket", "with_workers"), [(4, 1, 0, 0), only_in_sweep(30, 3, 2, 2)]
)
def test_whoever_dies_wherever_the_run_ends_as_if_nothing_had_happened(
    tmp_path: Path, inline: int, scenarios: int, in_bucket: int, with_workers: int
) -> None:
    crash_test = subprocess.run(
        [
            *(sys.executable, "-m", "tests.crash.run", "--directory", str(tmp_path)),
            *("--inline", str(inline), "--bucket", str(in_bucket), "--ray", str(with_workers)),
            *("--scenarios", str(scenarios), "--visits", "1"),
        ],
        cwd=ROOT,
        # Of this process's own cluster, which isn't the one that is used.
        env={name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
        capture_output=True,
        text=True,
    )
    assert crash_test.returncode == 0, crash_test.stdout + crash_test.stderr
    [in_all] = [line for line in crash_test.stdout.splitlines() if line.startswith("in all")]
    points, killed, carried_on, wrong = map(int, in_all.split()[2:])
    assert points >= inline + in_bucket + with_workers
    # A process on Ray may not come by its point a second time: things happen at the same time.
    assert killed >= points - with_workers
    assert (carried_on, wrong) == (killed, 0)
