"""A cluster with an autoscaler: a run may ask for more than there is, and waits for the nodes."""

from __future__ import annotations

import os
import subprocess
import sys

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

for scaling in SCALINGS:
    try:
        result = make_trainer(
            "reference", train, scaling_config=ScalingConfig(**scaling),
            run_config=RunConfig(storage_path="runs", progress=False),
        ).fit()
        print("RETURNED", result.return_values)
    except TrainingFailedError as error:
        print("FAILED", " ".join(str(error).split()))
"""


@pytest.fixture(
    scope="module",
    params=[only_in_sweep(1, id="first autoscaler"), pytest.param(2, id="second autoscaler")],
)
def printed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What a script prints that asks for what nodes can hold later, and for what none can."""
    directory = tmp_path_factory.mktemp("growing")
    # The first autoscaler doesn't say what it can't hold.
    patience_s = {1: 12, 2: 600}[request.param]
    scalings = [
        {"num_workers": 2, "resources_per_worker": {"CPU": 2}},
        {"resources_per_worker": {"GPU": 2}, "start_timeout_s": patience_s},
    ]
    (directory / "script.py").write_text(SCRIPT.replace("SCALINGS", repr(scalings)))
    node = {"resources": {"CPU": 2}, "labels": {"tier": "large"}}
    with growing_cluster(request.param, node, max_nodes=2) as address:
        run = subprocess.run(
            [sys.executable, "script.py"],
            cwd=directory,
            env={**os.environ, **OPEN, "RAY_ADDRESS": address},
            capture_output=True,
            text=True,
            timeout=200,
        )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_a_run_waits_for_the_nodes_that_the_autoscaler_adds(printed: str) -> None:
    assert "RETURNED ((2, 0), (2, 1))" in printed, printed


def test_what_no_node_can_hold_fails_long_before_the_timeout(printed: str) -> None:
    assert "FAILED" in printed, printed
    assert "1 worker of 1 CPU and 2 GPU each; the cluster has" in printed
    assert "its autoscaler " in printed
