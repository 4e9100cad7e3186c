"""A host is lost with its agents, and with what they kept: no step is repeated, or few are."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.torch_runs import equal
from tests.hosts import lost_agent_driver
from tests.hosts.lost_agent_driver import STEPS
from tests.hosts.test_lost_host import _entries

from polytrain import Result
from polytrain.testing.hosts import hosts, join_ray, ray_on
from polytrain.testing.processes import eventually

STANDS_BEFORE = 8
"""The step that the host's rank doesn't take: the others wait for it."""

pytestmark = pytest.mark.timeout(600)


def lose_host(path: Path, rank: int, **config: Any) -> dict[str, Any]:
    """Train on two hosts of which that of a rank is lost, and a third one takes its place.

    Returns:
        What the journal says of the search for a state.
    """
    config = {"directory": str(path), "rank": rank, "step": STANDS_BEFORE, **config}
    # The driver's host isn't lost: it has rank 0 if it has room for a worker.
    with hosts(3 + (rank == 0), shared=path) as (driver_host, *others):
        address = ray_on(driver_host, cpus=rank)
        *workers, spare = others
        for host in workers:
            join_ray(address, host, cpus=1)
        driver = driver_host.start(
            [sys.executable, lost_agent_driver.__file__, json.dumps(config)],
            env={"RAY_ADDRESS": address},
            output=subprocess.PIPE,
        )
        assert eventually(lambda: (path / "stands").exists(), 120)
        join_ray(address, spare, cpus=1)
        [launched] = _entries(path, "Launched")
        next(each for each in others if each.address == launched["hosts"][rank]).kill()
        printed, _ = driver.communicate(timeout=240)
        assert "finished True restarts 1" in printed, printed
    [asked] = _entries(path, "SurvivorsAsked")
    return asked


def steps_of(path: Path, rank: int) -> list[str]:
    """Return the attempt of each step that a rank has begun."""
    return (path / f"steps of {rank}").read_text().split()


def model_after(path: Path) -> Mapping[str, Any]:
    return Result.from_path(path / "run").load_model()


@pytest.fixture
def lost(tmp_path: Path) -> Path:
    path = tmp_path / "lost"
    path.mkdir()
    return path


def undisturbed(path: Path, **config: Any) -> Mapping[str, Any]:
    """Return the model of a run that loses nothing."""
    path = path / "undisturbed"
    path.mkdir()
    config = {"directory": str(path), "rank": -1, "step": 0, **config}
    return lost_agent_driver.fit(config).load_model()


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.only_in_sweep)])
def test_replicas_repeat_no_step(tmp_path: Path, lost: Path, rank: int) -> None:
    """What the lost rank had alone, its statistics and random numbers, lies on the other host."""
    config = {"strategy": "ddp", "memory": None, "written_by": "rank_0"}
    asked = lose_host(lost, rank, **config)
    assert asked["reason"] == ""
    assert asked["rank"] == 1 - rank
    # The step that it stood before is begun again, and no other.
    assert len(steps_of(lost, rank)) == STEPS + 1
    assert equal(model_after(lost), undisturbed(tmp_path, **config))
