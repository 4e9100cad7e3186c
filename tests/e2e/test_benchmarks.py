"""The benchmarks run: once, with little data and no other trainer, and every row has its figure.

Each time those that need few seconds, and all of them in a sweep.

Of what they require nothing is asked, on whatever machine is at hand.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.sweeps import only_in_sweep

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "tests/benchmarks"

ROWS = {
    "startup": ["2 workers: first line", "2 workers: all of fit()"],
    "scale": [
        f"2 workers: {what}"
        for what in ("first line", "all of fit()", "driver's memory", "driver's threads")
    ],
    "script": [
        "2 workers: first step",
        "xgboost: whole script",
        "xgboost: more than alone",
        "2 workers: peak memory",
        "2 workers: more than bare",
    ],
    "report": ["one call"],
    "recovery": [
        f"{backend}, 2 workers: first {what}"
        for backend in ("torch", "lightgbm")
        for what in ("line", "step")
    ],
    "recovery_agent": [
        f"torch, agent lost: {what}"
        for what in ("noticed", "first line", "first step", "step since notice")
    ],
    "overhead": [
        f"xgboost, {reporting}: {what}"
        for reporting in ("every step", "every tenth", "no reports")
        for what in ("steps", "overhead", "beside")
    ],
    "control_plane": [
        f"100 workers: {what}"
        for what in (
            *("start", "report", "checkpoint", "tick", "worker lost", "host lost", "drain", "end"),
            "memory of each",
        )
    ],
    "ingest": [
        *("columns of strings", "columns of tensors", "items, in any order"),
        *("arrays", "tensors", "windows", "memory, arrays"),
    ],
    "exact": [f"2 of 4: {what}" for what in ("a step", "CPU of a step", "memory")],
    "preflight": ["2 nodes, 2 connections"],
    "resume": ["in order", "windows", "any order"],
    "checkpoint": ["1 MB: stall", "1 MB: 20 steps"],
    "index": ["100 checkpoints"],
    "journal": [
        f"10,000 reports: {what}"
        for what in (
            *("one", "memory", "journal"),
            *("resume", "CPU time of a resume", "memory of a resume"),
        )
    ],
    "page": [
        "--help",
        "runs, of 20: CPU",
        "page of 100 reports: size",
        "page of 10,000 reports",
        "driver of 8 ranks with a bar",
    ],
    "boosters": [
        f"{backend}: {what}"
        for backend in ("xgboost", "lightgbm")
        for what in ("with start", "without start", "memory")
    ],
    "torch": ["conv: steps", "conv: overhead", "conv: whole run"],
    "plan": [
        f"{what}, {order}"
        for what in ("next row", "first row", "row in 1024", "memory")
        for order in ("in order", "any order", "windows")
    ],
}
PEERS = {
    "boosters": ["one process"],
    "checkpoint": ["torch.save", "one copy"],
    "overhead": ["bare xgboost"],
    "script": ["torchrun", "bare processes", "one process"],
    "torch": ["torchrun"],
    "exact": ["DDP"],
    "ingest": ["DataLoader", "… no worker", "bare scan"],
}
EACH_TIME = ("control_plane", "plan", "index")
FIGURE = r"-?[\d.]+(e[+-]\d+)? ((s|ms|µs|ns|[Mk]?/s|[GMk]B|threads)\b|%)"


@pytest.mark.sweep
@pytest.mark.parametrize(
    "name", [name if name in EACH_TIME else only_in_sweep(name) for name in ROWS]
)
def test_quick(name: str) -> None:
    run = subprocess.run(
        [sys.executable, BENCHMARKS / f"bench_{name}.py", "--quick"],
        # As `make` calls it: one of them has helpers of the tests.
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    for row in ROWS[name]:
        assert re.search(rf"^ *{re.escape(row)} +polytrain +{FIGURE}", run.stdout, re.M), run.stdout
    for peer in PEERS.get(name, []):
        assert re.search(rf"^ *{peer} +{FIGURE}", run.stdout, re.M), run.stdout
