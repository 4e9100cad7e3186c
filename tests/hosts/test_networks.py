"""Hosts with two networks: ranks of several hosts use the one that the user has chosen."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from polytrain.testing.hosts import Host, ray_on

DRIVER = """
import json, os, sys
from pathlib import Path
import psutil
import polytrain
from polytrain import RunConfig, ScalingConfig, make_trainer

def train(config):
    sockets = psutil.Process().net_connections("tcp4")
    found = {
        "listens": [socket.laddr for socket in sockets if socket.status == "LISTEN"],
        "peers": [socket.raddr.ip for socket in sockets if socket.raddr],
        "interfaces": {k: v for k, v in os.environ.items() if k.endswith("_SOCKET_IFNAME")},
    }
    Path(f"{config['name']}-{polytrain.get_context().get_world_rank()}").write_text(json.dumps(found))

for name, options in json.loads(sys.argv[1]).items():
    try:
        make_trainer(
            "torch", train, train_loop_config={"name": name},
            scaling_config=ScalingConfig(num_workers=2, placement_strategy="STRICT_SPREAD"),
            run_config=RunConfig(storage_path="runs", progress=False, **options),
        ).fit()
    except polytrain.TrainingFailedError as error:
        Path(name).write_text(str(error))
"""

SUBNET = "10.78.0.0/24"


def give_second_network(host: Host, interface: str, address: str) -> None:
    lines = (
        f"ip link add link eth0 name {interface} type macvlan mode bridge",
        f"ip addr add {address}/24 dev {interface}",
        f"ip link set {interface} up",
    )
    try:
        host.run(" && ".join(lines))
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no second interface can be made: {error.stderr}")


def read(path: Path) -> Any:
    return json.loads(path.read_text())


@pytest.mark.only_in_sweep
def test_ranks_use_the_chosen_network(two: tuple[Host, ...], tmp_path: Path) -> None:
    """Only several hosts show which addresses ranks offer, listen at and connect to."""
    a, b = two
    give_second_network(a, "fast0", "10.78.0.1")
    give_second_network(b, "data0", "10.78.0.2")
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    gloo_by_hand = {"env_vars": {"GLOO_SOCKET_IFNAME": "eth0"}}
    runs = {
        "default": {},
        "subnet": {"network_interface": SUBNET, "ports": "30000-30010"},
        "variable": {"network_interface": SUBNET, "worker_runtime_env": gloo_by_hand},
        "unknown": {"network_interface": "fast0"},
    }
    address = ray_on(a, b)
    a.run([sys.executable, script, json.dumps(runs)], env={"RAY_ADDRESS": address}, timeout=600)

    for rank, host in enumerate(two):
        default = read(tmp_path / f"default-{rank}")
        assert {ip for ip, _ in default["listens"]} == {host.address}
        assert default["interfaces"] == {"GLOO_SOCKET_IFNAME": "eth0"}

        subnet, interface = read(tmp_path / f"subnet-{rank}"), ("fast0", "data0")[rank]
        assert {ip for ip, _ in subnet["listens"]} == {f"10.78.0.{rank + 1}"}
        assert set(subnet["peers"]) <= {"10.78.0.1", "10.78.0.2"}
        assert subnet["interfaces"] == {
            "GLOO_SOCKET_IFNAME": interface,
            "NCCL_SOCKET_IFNAME": f"={interface}",
            "TP_SOCKET_IFNAME": interface,
        }
        in_range = [port for _, port in subnet["listens"] if 30000 <= port <= 30010]
        assert len(in_range) == 1, "rank 0's store, and that of the second host"

        by_hand = read(tmp_path / f"variable-{rank}")
        assert host.address in {ip for ip, _ in by_hand["listens"]}, "gloo's"
        assert by_hand["interfaces"]["GLOO_SOCKET_IFNAME"] == "eth0"

    refused = (tmp_path / "unknown").read_text()
    assert f"the node {b.address} has no interface with an IPv4 address named fast0" in refused
    assert f"eth0 ({b.address}), data0 (10.78.0.2)" in refused
