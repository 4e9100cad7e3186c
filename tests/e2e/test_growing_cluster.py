"""A cluster with an autoscaler: a run may ask for more than there is, and waits for the nodes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.growing_cluster import OPEN, growing_cluster
from tests.sweeps import only_in_sweep

SCRIPT = """
import logging, sys
import ray
import polytrain
from polytrain import RunConfig, ScalingConfig, TrainingFailedError, make_trainer

logging.basicConfig(format="%(message)s", stream=sys.stdout)

def train():
    import os
    context = polytrain.get_context()
    return (context.get_world_size(), context.get_node_rank())

try:
    result = make_trainer(
        "reference", train, scaling_config=ScalingConfig(SCALING),
        run_config=RunConfig(storage_path="runs", progress=False),
    ).fit()
    print("RETURNED", result.return_values)
except TrainingFailedError as error:
    print("FAILED", " ".join(str(error).split()))
"""


def fitted(directory: Path, address: str, scaling: str) -> str:
    """Run a script that trains with this `ScalingConfig` on the cluster; return its output."""
    (directory / "script.py").write_text(SCRIPT.replace("SCALING", scaling))
    run = subprocess.run(
        [sys.executable, "script.py"],
        cwd=directory,
        env={**os.environ, **OPEN, "RAY_ADDRESS": address},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


@pytest.fixture(
    scope="module",
    params=[only_in_sweep(1, id="first autoscaler"), pytest.param(2, id="second autoscaler")],
)
def address(request: pytest.FixtureRequest) -> Iterator[str]:
    node = {"resources": {"CPU": 2}, "labels": {"tier": "large"}}
    with growing_cluster(request.param, node, max_nodes=2) as address:
        yield address


def test_a_run_waits_for_the_nodes_that_the_autoscaler_adds(tmp_path: Path, address: str) -> None:
    printed = fitted(tmp_path, address, 'num_workers=2, resources_per_worker={"CPU": 2}')
    assert "RETURNED ((2, 0), (2, 1))" in printed, printed


def test_what_no_node_can_hold_fails_long_before_the_timeout(
    tmp_path: Path, address: str, request: pytest.FixtureRequest
) -> None:
    patience = "start_timeout_s=600"
    if "first" in request.node.name:
        # It doesn't say what it can't hold.
        patience = "start_timeout_s=12"
    printed = fitted(tmp_path, address, f'resources_per_worker={{"GPU": 2}}, {patience}')
    assert "FAILED" in printed, printed
    assert "1 worker of 1 CPU and 2 GPU each; the cluster has" in printed
    assert "its autoscaler " in printed
