"""Hosts that a run can't use: the doctor finds them, and so does the run, before it trains."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from polytrain.testing.hosts import Host, ray_on

pytestmark = [pytest.mark.only_in_sweep, pytest.mark.timeout(600)]

Pair = tuple[Host, ...]

_DRIVER = """
import sys
import polytrain
from polytrain import FailureConfig, RunConfig, ScalingConfig, make_trainer

try:
    make_trainer(
        "reference", lambda: print("TRAINED"),
        scaling_config=ScalingConfig(num_workers=2, placement_strategy="STRICT_SPREAD"),
        run_config=RunConfig(
            storage_path="runs", progress=False, preflight=sys.argv[1],
            failure_config=FailureConfig(rendezvous_timeout_s=5),
        ),
    ).fit()
except polytrain.TrainingFailedError as error:
    print("FAILED", error)
"""

_RANKS_PORTS = range(20_000, 65_536)


def fitted(host: Host, directory: Path, address: str, *, preflight: str = "links") -> str:
    """What a run on two hosts prints."""
    script = directory / "script.py"
    script.write_text(_DRIVER)
    command = [sys.executable, script, preflight]
    return host.run(command, env={"RAY_ADDRESS": address}).stdout


def doctored(host: Host, directory: Path, address: str) -> dict[str, tuple[str, str]]:
    """What has failed according to the doctor, by check: what, and the remedy."""
    command = [sys.executable, "-m", "polytrain", "doctor", "--nodes", "all", "--json"]
    command += ["--storage", str(directory / "runs"), "--backend", "reference"]
    done = host.run(command, env={"RAY_ADDRESS": address}, check=False)
    found = json.loads(done.stdout[done.stdout.index("{") :])["data"]
    failed = [each for each in found if each["verdict"] == "failed"]
    assert bool(failed) == (done.returncode == 1)
    return {each["check"]: (each["what"], each["remedy"]) for each in failed}


def test_a_host_whose_firewall_lets_nothing_in(two: Pair, tmp_path: Path) -> None:
    """It can connect to the other, so some backends train, if they give it the right rank."""
    a, b = two
    address = ray_on(a, b)
    assert doctored(a, tmp_path, address) == {}
    b.block(ports=_RANKS_PORTS)
    [(check, (what, remedy))] = doctored(a, tmp_path, address).items()
    assert check == f"plain TCP to {b.address}"
    assert what.startswith(f"{a.address} can't connect to {b.address} (port ")
    assert f"connect to {b.address} over TCP, at all ports" in remedy
    printed = fitted(a, tmp_path, address)
    assert f"{a.address} can't connect to {b.address} (port " in printed
    assert "RunConfig(preflight='off')" in printed
    assert "TRAINED" not in printed
    a.block(ports=_RANKS_PORTS)
    printed = fitted(a, tmp_path, address, preflight="off")
    assert (
        f"in time (rendezvous_timeout_s=5): rank 0 on {a.address}, rank 1 on {b.address}."
        in printed
    )
    assert "`polytrain doctor --nodes all`" in printed
    assert "What the ranks were doing" not in printed


def test_a_shared_directory_that_is_read_only_on_a_host(two: Pair, tmp_path: Path) -> None:
    a, b = two
    address = ray_on(a, b)
    b.read_only()
    [(check, (what, remedy))] = doctored(a, tmp_path, address).items()
    assert check == f"{b.address}: storage"
    assert what == f"it can't write to {tmp_path}/runs (Read-only file system)"
    assert remedy.startswith("Mount it there so that this user can write")
    printed = fitted(a, tmp_path, address)
    assert f"the node {b.address} can't write to {tmp_path}/runs/" in printed
    assert "TRAINED" not in printed
    b.heal()
    assert printed.count("FAILED") == 1
    assert fitted(a, tmp_path, address).count("TRAINED") == 2
    assert not list(tmp_path.rglob(".polytrain-*"))
