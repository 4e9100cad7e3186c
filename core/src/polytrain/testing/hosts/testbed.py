"""Several hosts on one machine, and Ray on them: one node of its cluster on each."""

from __future__ import annotations

import itertools
import os
import shlex
import string
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

from polytrain.testing.hosts import keeper
from polytrain.testing.hosts.host import Host
from polytrain.testing.hosts.namespaces import (
    Freezer,
    HostsUnavailable,
    Switch,
    address_of,
    freezer_roots,
    mount_script,
    switch,
    why_no_hosts,
)

_NAMESPACES = ("--mount", "--uts", "--ipc", "--net", "--pid")
_counter = itertools.count()


@contextmanager
def hosts(count: int, *, shared: Path | None = None) -> Iterator[tuple[Host, ...]]:
    """Several hosts on this machine, connected by a switch, for as long as the block lasts.

        with hosts(3, shared=tmp_path) as (a, b, c):
            a.run([sys.executable, script])
            b.crash()

    A host has a network, a name, processes, a /tmp, a /dev/shm and a disk of its own; of the
    machine's other files it sees all and changes none. It reaches the other hosts and nothing else.
    All processes of all hosts end with the block, or with this process, however it ends.

    Args:
        count: how many, up to 26. Their names are a, b, c and so on.
        shared: a directory of this machine that all hosts see and write, at the same path.

    Raises:
        HostsUnavailable: this machine can't do that. `why_no_hosts` says it before.
    """
    reason = why_no_hosts()
    if reason is not None:
        raise HostsUnavailable(reason)
    groups = freezer_roots()[0] / f"polytrain-hosts-{os.getpid()}-{next(_counter)}"
    names = string.ascii_lowercase[:count]
    with ExitStack() as stack:
        owner = os.pidfd_open(os.getpid())
        stack.callback(os.close, owner)
        network = stack.enter_context(switch(owner, groups))
        script = mount_script(
            shared=shared,
            needed=_needed(),
            addresses={name: address_of(at) for at, name in enumerate(names, 1)},
        )
        yield tuple(
            stack.enter_context(
                _booted(
                    number=number,
                    name=name,
                    shared=shared,
                    switch=network,
                    freezer=Freezer(groups / name),
                    script=f"hostname {name}\n{script}",
                    owner=owner,
                )
            )
            for number, name in enumerate(names, 1)
        )


@contextmanager
def _booted(
    *,
    number: int,
    name: str,
    shared: Path | None,
    switch: Switch,
    freezer: Freezer,
    script: str,
    owner: int,
) -> Iterator[Host]:
    first = shlex.join([sys.executable, "-I", "-S", keeper.__file__, str(owner)])
    enter = ["unshare", *_NAMESPACES, "--fork", "--kill-child", "--", "sh", "-c"]
    line = shlex.join([*enter, f"{script}\nexec {first}"])
    waiter = subprocess.Popen(
        ["sh", "-c", f"echo 0 > {shlex.quote(str(freezer.members))} && exec {line}"],
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=[owner],
        start_new_session=True,
    )
    with waiter:
        assert waiter.stdout is not None
        assert waiter.stderr is not None
        if not waiter.stdout.readline():
            raise HostsUnavailable(f"host {name} didn't start: {waiter.stderr.read().strip()}")
        pid = psutil.Process(waiter.pid).children()[0].pid
        host = Host(
            number=number,
            name=name,
            shared=shared,
            switch=switch,
            freezer=freezer,
            pid=pid,
            waiter=waiter,
        )
        try:
            switch.connect(number, pid)
            yield host
        finally:
            host.kill()


def _needed() -> list[Path]:
    """What this process reads Python's modules from."""
    found = {Path(place).resolve() for place in (sys.prefix, sys.base_prefix, *sys.path) if place}
    return sorted(path for path in found if path.is_dir())


_PORT = 6379
_WITHOUT_SERVE = """
import sys
sys.modules["ray.serve.scripts"] = None
from ray.scripts.scripts import main
main()
"""
_RAY = (sys.executable, "-c", _WITHOUT_SERVE)
"""Ray's command line without the commands of Ray Serve, whose imports take longer than all else."""

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
    # Drivers get no logs.
    start = [*_RAY, "start", *options, *place, *sizes, *ports, "--include-log-monitor=false"]
    patience = {"RAY_raylet_start_wait_time_s": str(_STARTS_WITHIN_S)}
    for _ in range(_TRIES - 1):
        try:
            host.run(start, env={**patience, **(env or {})}, timeout=_STARTS_WITHIN_S)
            return
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
            leave_ray(host)
    host.run(start, env={**patience, **(env or {})}, timeout=_STARTS_WITHIN_S)
