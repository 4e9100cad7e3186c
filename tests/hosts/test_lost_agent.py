"""A host is lost with its agents, and with what they kept: no step is repeated, or few are."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.torch_runs import equal
from tests.hosts import lost_agent_driver
from tests.hosts.lost_agent_driver import STEPS
from tests.hosts.test_lost_host import _entries
from tests.sweeps import only_in_sweep

from polytrain import Result
from polytrain.testing.hosts import Host, hosts, join_ray, ray_on
from polytrain.testing.processes import eventually

STANDS_BEFORE = 8
"""The step that the host's rank doesn't take: the others wait for it."""

pytestmark = pytest.mark.timeout(600)


def lose_hosts(
    path: Path,
    *ranks: int,
    lose: Callable[[Host], object] = Host.kill,
    meddle: Callable[[Host], object] = lambda host: None,
    **config: Any,
) -> dict[str, Any]:
    """Train on two hosts, of which those of these ranks are lost, and others take their places.

    Args:
        path: a directory that all hosts share.
        ranks: the ranks. The first one stands still before its host is lost.
        lose: is called with each of those hosts.
        meddle: is called with each of the two hosts before.
        config: what is trained.

    Returns:
        What the journal says of the search for a state.
    """
    config = {"directory": str(path), "rank": ranks[0], "step": STANDS_BEFORE, **config}
    # The driver's host isn't lost. It has rank 0 if it has room for a worker.
    has_room = int(0 not in ranks)
    with hosts(3 - has_room + len(ranks), shared=path) as (first, *others):
        address = ray_on(first, cpus=has_room)
        workers, spares = others[: 2 - has_room], others[2 - has_room :]
        for host in workers:
            join_ray(address, host, cpus=1)
        driver = first.start(
            [sys.executable, lost_agent_driver.__file__, json.dumps(config)],
            env={"RAY_ADDRESS": address},
            output=subprocess.PIPE,
        )
        stands = path / "stands"
        if not eventually(lambda: stands.exists() or driver.poll() is not None, 240):
            driver.kill()
        assert stands.exists(), driver.communicate()[0]
        for host in spares:
            # Room for two, so that what is reserved on a silent host moves at once.
            join_ray(address, host, cpus=2)
        [launched] = _entries(path, "Launched")
        by_address = {host.address: host for host in (first, *workers)}
        both = [by_address[each] for each in launched["hosts"]]
        for host in both:
            meddle(host)
        for rank in ranks:
            lose(both[rank])
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


# In `make test`, `tests/e2e/test_replicas.py` has replicas of ranks on this machine.
@pytest.mark.only_in_sweep
@pytest.mark.parametrize("rank", [1, 0])
def test_replicas_repeat_no_step(tmp_path: Path, lost: Path, rank: int) -> None:
    """What the lost rank had alone, its statistics and random numbers, lies on the other host."""
    config = {"strategy": "ddp", "memory": None, "written_by": "rank_0"}
    asked = lose_hosts(lost, rank, **config)
    assert asked["reason"] == ""
    assert asked["rank"] == 1 - rank
    # The step that it stood before is begun again, and no other.
    assert len(steps_of(lost, rank)) == STEPS + 1
    assert equal(model_after(lost), undisturbed(tmp_path, **config))


SHARDS = {"strategy": "fsdp", "memory": 2, "written_by": "every_rank"}


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("rank", "lose", "message"),
    [
        (1, Host.cut_off, "is silent"),
        only_in_sweep(1, Host.kill, ""),
        only_in_sweep(0, Host.kill, ""),
    ],
    ids=["vanishes", "killed", "killed with rank 0"],
)
def test_shards_continue_from_the_copies_on_another_host(
    tmp_path: Path, lost: Path, rank: int, lose: Callable[[Host], object], message: str
) -> None:
    asked = lose_hosts(lost, rank, lose=lose, **SHARDS)
    assert asked["reason"] == ""
    [ended] = _entries(lost, "AttemptEnded")
    assert ended["failure"]["kind"] == "NODE_LOST"
    assert message in ended["failure"]["message"]
    [kept, _] = [each["hosts"] for each in _entries(lost, "Launched")]
    assert asked["hosts"] == [kept[1 - rank]]
    assert len(steps_of(lost, rank)) < STANDS_BEFORE + STEPS
    assert equal(model_after(lost), undisturbed(tmp_path, **SHARDS))


def damage(host: Host) -> None:
    files = "$(find $TMPDIR -path '*/neighbours/*' -type f)"
    host.run(f'test -n "{files}" && for file in {files}; do echo x >> $file; done')


@pytest.mark.only_in_sweep
def test_a_damaged_copy_is_refused(tmp_path: Path, lost: Path) -> None:
    asked = lose_hosts(lost, 1, meddle=damage, **SHARDS)
    assert "is damaged" in asked["reason"]
    assert len(steps_of(lost, 1)) == STANDS_BEFORE + STEPS
    assert equal(model_after(lost), undisturbed(tmp_path, **SHARDS))


@pytest.mark.only_in_sweep
@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_if_both_hosts_are_lost_the_run_resumes_from_the_storage(
    tmp_path: Path, lost: Path, strategy: str
) -> None:
    config = {**SHARDS, "strategy": strategy}
    asked = lose_hosts(lost, 1, 0, **config)
    assert asked["reason"] != ""
    assert len(steps_of(lost, 1)) == STANDS_BEFORE + STEPS
    assert equal(model_after(lost), undisturbed(tmp_path, **config))
