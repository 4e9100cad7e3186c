"""Ray on several hosts: one node of its cluster on each."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from polytrain.testing.hosts.host import Host

_PORT = 6379
_RAY = (sys.executable, "-m", "ray.scripts.scripts")
_STARTS_WITHIN_S = 60
"""Seconds that a node may take to start on a busy machine. Ray itself would wait for 30 s."""

_TRIES = 4
"""On a busy machine a raylet ends, because its agent hasn't started within 15 s."""

_OBJECT_STORE = 100_000_000
_PORTS = (
    "node-manager-port",
    "object-manager-port",
    "runtime-env-agent-port",
    "dashboard-agent-grpc-port",
    "dashboard-agent-listen-port",
    "metrics-export-port",
)


def ray_on(
    *hosts: Host,
    cpus: int = 2,
    env: Mapping[str, str] | None = None,
    autoscaling_config: Path | None = None,
) -> str:
    """Start Ray on hosts, the head on the first, and return the address of the cluster.

    A driver inside any host gets it as `RAY_ADDRESS`. Ray ends with the hosts. It listens below
    port 20000 alone, its workers too: `block(ports=range(20000, 65536))` spares it.

    Args:
        hosts: the first has the head.
        cpus: of each host, whatever the machine has.
        env: variables of all of Ray's processes, such as `RAY_health_check_period_ms`.
        autoscaling_config: the file that configures Ray's autoscaler, which runs in the head.
    """
    head, *others = hosts
    start = [f"--port={_PORT}", "--head", "--include-dashboard=false"]
    if autoscaling_config is not None:
        start.append(f"--autoscaling-config={autoscaling_config}")
    _start_node(head, start, cpus=cpus, env=env)
    address = f"{head.address}:{_PORT}"
    with ThreadPoolExecutor(max_workers=len(hosts)) as threads:
        joined = [threads.submit(join_ray, address, host, cpus=cpus, env=env) for host in others]
        for future in joined:
            future.result()
    return address


def join_ray(
    address: str, host: Host, *, cpus: int = 2, env: Mapping[str, str] | None = None
) -> None:
    """Let a host join the Ray cluster at an address."""
    _start_node(host, [f"--address={address}"], cpus=cpus, env=env)


def leave_ray(host: Host) -> None:
    """Kill what is left of Ray on a host, so that it can join again."""
    host.run([*_RAY, "stop", "--force"])


def _start_node(
    host: Host, options: list[str], *, cpus: int, env: Mapping[str, str] | None
) -> None:
    ports = [f"--{name}={10_000 - at}" for at, name in enumerate(_PORTS, 1)]
    sizes = [f"--num-cpus={cpus}", "--num-gpus=0", f"--object-store-memory={_OBJECT_STORE}"]
    place = [f"--node-ip-address={host.address}", "--temp-dir=/tmp/ray", "--disable-usage-stats"]
    start = [*_RAY, "start", *options, *place, *sizes, *ports]
    patience = {"RAY_raylet_start_wait_time_s": str(_STARTS_WITHIN_S)}
    for _ in range(_TRIES - 1):
        try:
            host.run(start, env={**patience, **(env or {})}, timeout=_STARTS_WITHIN_S)
            return
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
            leave_ray(host)
    host.run(start, env={**patience, **(env or {})}, timeout=_STARTS_WITHIN_S)
