"""A host that is lost with a rank and the standby on it: one failure, and other hosts have room."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from polytrain.testing.hosts import Host, hosts, join_ray, ray_on
from polytrain.testing.processes import eventually

_DRIVER = """
import sys, time

import polytrain
from polytrain import FailureConfig, RunConfig, ScalingConfig, make_trainer
from polytrain.collective import barrier


def train(config):
    attempt = polytrain.get_context().get_attempt()
    while True:
        barrier()
        polytrain.report({"attempt": attempt})
        if attempt:
            return
        time.sleep(0.05)

result = make_trainer(
    "reference",
    train,
    train_loop_config={},
    scaling_config=ScalingConfig(
        num_workers=2, standby=1, placement_strategy="STRICT_SPREAD"
    ),
    run_config=RunConfig(
        storage_path=sys.argv[1],
        name="run",
        progress=False,
        failure_config=FailureConfig(max_failures=1),
    ),
).fit()
print("finished", result.finished)
"""


# In `make test`, `test_worker_pool` has a standby that goes with its node.
@pytest.mark.only_in_sweep
def test_a_host_that_is_lost_with_a_rank_and_the_standby_is_one_failure(tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text(_DRIVER)
    with hosts(3, shared=tmp_path) as (a, b, c):
        address = ray_on(a, cpus=1)
        join_ray(address, b, cpus=2)
        driver = a.start(
            [sys.executable, script, tmp_path],
            env={"RAY_ADDRESS": address},
            output=subprocess.PIPE,
        )
        assert eventually(lambda: len(_entries(tmp_path, "Joined")) == 2, 120)
        # There is no room for the standby elsewhere.
        assert eventually(lambda: _agents_on(b) == 2, 120)
        join_ray(address, c, cpus=2)
        b.kill()
        printed, _ = driver.communicate(timeout=240)
        assert "finished True" in printed, printed
        [ended] = _entries(tmp_path, "AttemptEnded")
        assert ended["failure"]["kind"] == "NODE_LOST"
        assert [each["hosts"] for each in _entries(tmp_path, "Launched")] == [
            [a.address, b.address],
            [a.address, c.address],
        ]


def _entries(shared: Path, event: str) -> list[dict[str, Any]]:
    journal = shared / "run" / "journal.jsonl"
    lines = journal.read_text().splitlines() if journal.exists() else []
    return [entry for entry in map(json.loads, lines) if entry["event"] == event]


def _agents_on(host: Host) -> int:
    return host.run("ps ax").stdout.count("ray::RayHost")
