"""A silent node is lost in seconds, long before Ray notices; one that is back is used."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.e2e.journals import journal

from polytrain.testing.hosts import Host, hosts, ray_on
from polytrain.testing.processes import eventually

_DRIVER = Path(__file__).with_name("silence_driver.py")


@contextmanager
def run(
    shared: Path, workers: str, *, standby: int = 0, steps: int = 60
) -> Iterator[tuple[dict[str, Host], subprocess.Popen[str]]]:
    """Hosts by name, and a driver in the first, once its ranks train."""
    with hosts(3, shared=shared) as three:
        address = ray_on(*three, cpus=1)
        # Hosts have a /tmp of their own, in which a checkout may lie.
        script = shutil.copy(_DRIVER, shared)
        command = [sys.executable, script, shared, workers, str(standby), str(steps)]
        environment = {"RAY_ADDRESS": address, "POLYTRAIN_COLOR": "0"}
        driver = three[0].start(command, env=environment, output=subprocess.PIPE)
        assert eventually(lambda: steps_of(shared) > 3, 120)
        yield {host.name: host for host in three}, driver


def steps_of(shared: Path) -> int:
    return len(list(shared.glob("run/checkpoints/*/polytrain-manifest.json")))


def failures(shared: Path) -> list[str]:
    """Kind and message of each failure of the run."""
    ended = [line for line in journal(shared / "run", "AttemptEnded") if line.get("failure")]
    return [f"{line['failure']['kind']}: {line['failure']['message']}" for line in ended]


def host_with_a_rank(shared: Path, found: dict[str, Host]) -> Host:
    """A host that isn't the driver's, and has a rank of the newest attempt."""
    launched = journal(shared / "run", "Launched")[-1]
    return next(each for each in list(found.values())[1:] if each.address in launched["hosts"])


def workers_on(host: Host) -> set[int]:
    """Process ids, there, of agents and worker processes."""
    lines = host.run("ps ax -o pid,args").stdout.splitlines()
    return {int(line.split()[0]) for line in lines if "RayHost" in line or "rank " in line}


# In `make test`, `test_lost_agent` has a node that vanishes.
@pytest.mark.only_in_sweep
def test_a_standby_takes_the_rank_of_a_node_that_vanishes(tmp_path: Path) -> None:
    with run(tmp_path, "2", standby=1) as (found, driver):
        host_with_a_rank(tmp_path, found).cut_off()
        output, _ = driver.communicate(timeout=120)
    assert "LAST STEP 60" in output
    [failure] = failures(tmp_path)
    assert failure.startswith("NODE_LOST")
    assert "is silent" in failure


@pytest.mark.only_in_sweep
def test_a_node_that_is_back_is_used_again_and_keeps_nothing(tmp_path: Path) -> None:
    # The run goes on for as long as its hosts are there.
    with run(tmp_path, "[1, 3]", steps=100_000) as (found, _):
        assert eventually(lambda: attempt_of_three(tmp_path) is not None, 120)
        cut = host_with_a_rank(tmp_path, found)
        before = workers_on(cut)
        cut.cut_off()
        assert eventually(lambda: len(failures(tmp_path)) == 1, 60)
        lost = journal(tmp_path / "run", "Launched")[-1]["attempt"]
        cut.heal()
        assert eventually(lambda: not before & workers_on(cut), 60)
        assert eventually(lambda: (attempt_of_three(tmp_path) or 0) >= lost, 120)
        assert len(failures(tmp_path)) == 1


def attempt_of_three(shared: Path) -> int | None:
    """The newest attempt, if it has three ranks."""
    newest = journal(shared / "run", "Launched")[-1]
    return newest["attempt"] if newest["world_size"] == 3 else None


@pytest.mark.only_in_sweep
def test_a_run_of_fixed_size_waits_for_a_node_that_comes_back(tmp_path: Path) -> None:
    with run(tmp_path, "3") as (found, driver):
        found["b"].cut_off()
        assert eventually(lambda: len(failures(tmp_path)) == 1, 60)
        found["b"].heal()
        output, _ = driver.communicate(timeout=200)
    assert "LAST STEP 60" in output
    assert [line["world_size"] for line in journal(tmp_path / "run", "Launched")] == [3, 3]
