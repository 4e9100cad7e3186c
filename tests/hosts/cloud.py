"""A cloud whose machines are hosts, and the node provider by which Ray's autoscaler uses it.

The autoscaler runs in the head's host and can't make hosts. The cloud runs in the test's process,
and serves what the provider calls at a socket in the shared directory.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

from ray.autoscaler.node_provider import NodeProvider
from ray.autoscaler.tags import NODE_KIND_HEAD, TAG_RAY_NODE_KIND, TAG_RAY_USER_NODE_TYPE
from tests.e2e.growing_cluster import autoscaling_config

from polytrain.testing.hosts import Host, hosts, join_ray, ray_on

_HEAD = "head"
_REPOSITORY = Path(__file__).parents[2]
_PYTHONPATH = f"{_REPOSITORY}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"


@dataclass(kw_only=True)
class _Machine:
    """A machine that was asked for and hasn't been given back."""

    host: Host
    tags: dict[str, str]
    is_running: bool = False


@dataclass(kw_only=True)
class Cloud:
    """Starts a node on a spare host for each that Ray's autoscaler asks for."""

    head: Host
    address: str
    """Of the Ray cluster."""

    spare: list[Host]
    """The machines that it still has: one that was given back is not used again."""

    asked: dict[str, float] = field(default_factory=dict)
    """Machine → when the autoscaler asked for it, in seconds since the epoch."""

    given_back: list[str] = field(default_factory=list)
    """The machines that the autoscaler has given back."""

    looks: int = 0
    """How many times the autoscaler has looked which machines there are, about once a second."""

    _machines: dict[str, _Machine] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _threads: list[threading.Thread] = field(default_factory=list)

    @property
    def driver_env(self) -> dict[str, str]:
        """What a driver, a process of any of its hosts, gets."""
        return {"RAY_ADDRESS": self.address, "POLYTRAIN_COLOR": "0", "PYTHONPATH": _PYTHONPATH}

    @property
    def machines(self) -> list[str]:
        """The machines that were asked for, and not given back or taken away."""
        with self._lock:
            return list(self._machines)

    @property
    def running(self) -> dict[str, Host]:
        """The machines whose node has joined Ray, besides the head."""
        with self._lock:
            return {name: each.host for name, each in self._machines.items() if each.is_running}

    def preempt(self, host: Host, *, notice_s: int = 0) -> None:
        """Take a machine away for good, and announce it some seconds ahead if there are any."""
        if notice_s:
            self.head.run([sys.executable, "-c", _DRAIN, self.address, host.address, str(notice_s)])
            time.sleep(notice_s)
        with self._lock:
            # The autoscaler gives a drained node back by itself.
            self._machines.pop(host.name, None)
        host.kill()

    # What the provider calls.

    def create(self, tags: dict[str, str], count: int, cpus: int) -> None:
        with self._lock:
            if len(self.spare) < count:
                raise RuntimeError("no machine of this type is left in the zone")
            for _ in range(count):
                host = self.spare.pop(0)
                self.asked[host.name] = time.time()
                self._machines[host.name] = _Machine(host=host, tags=tags)
                thread = threading.Thread(target=self._start, args=(host.name, cpus))
                self._threads.append(thread)
                thread.start()

    def nodes(self) -> dict[str, tuple[dict[str, str], bool]]:
        """Machine → its tags, and whether it runs."""
        head = {TAG_RAY_NODE_KIND: NODE_KIND_HEAD, TAG_RAY_USER_NODE_TYPE: _HEAD}
        with self._lock:
            machines = {n: (each.tags, each.is_running) for n, each in self._machines.items()}
        return {_HEAD: (head, True), **machines}

    def look(self) -> dict[str, tuple[dict[str, str], bool]]:
        """The same, once for each turn of the autoscaler."""
        self.looks += 1
        return self.nodes()

    def terminate(self, names: list[str]) -> None:
        with self._lock:
            machines = {name: self._machines.pop(name) for name in names if name in self._machines}
        self.given_back += machines
        for machine in machines.values():
            machine.host.kill()

    def _start(self, name: str, cpus: int) -> None:
        machine = self._machines[name]
        node_type = machine.tags[TAG_RAY_USER_NODE_TYPE]
        # The machine may have been given back, or taken away, before its node started.
        with suppress(Exception):
            join_ray(self.address, machine.host, cpus=cpus, env=_named(name, node_type))
            machine.is_running = True

    def serve(self, listener: Listener) -> None:
        """Answer the provider until the listener is closed."""
        with suppress(OSError):
            while True:
                with listener.accept() as connection:
                    method, arguments = connection.recv()
                    try:
                        connection.send((getattr(self, method)(*arguments), None))
                    except RuntimeError as error:
                        connection.send((None, str(error)))


_DRAIN = """
import sys, time, ray
from ray._raylet import GcsClient
from ray.core.generated.autoscaler_pb2 import DrainNodeReason

address, host, notice_s = sys.argv[1:]
ray.init(address, logging_level=40)
[node] = [n["NodeID"] for n in ray.nodes() if n["NodeManagerAddress"] == host and n["Alive"]]
reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
deadline_ms = int((time.time() + int(notice_s)) * 1000)
accepted, why_not = GcsClient(address).drain_node(node, reason, "it is taken away", deadline_ms)
assert accepted, why_not
"""


class HostProvider(NodeProvider):
    """What Ray's autoscaler calls: see `Cloud`."""

    def create_node_with_resources_and_labels(
        self, node_config: Any, tags: Any, count: int, resources: Any, labels: Any
    ) -> None:
        self._call("create", dict(tags), count, int(resources["CPU"]))

    def non_terminated_nodes(self, tag_filters: Mapping[str, str]) -> list[str]:
        nodes = self._call("look")
        return [name for name, (tags, _) in nodes.items() if tag_filters.items() <= tags.items()]

    def is_running(self, node_id: str) -> bool:
        return bool(self._call("nodes").get(node_id, ({}, False))[1])

    def is_terminated(self, node_id: str) -> bool:
        return node_id not in self._call("nodes")

    def node_tags(self, node_id: str) -> dict[str, str]:
        tags: dict[str, str] = self._call("nodes").get(node_id, ({}, False))[0]
        return tags

    def terminate_nodes(self, node_ids: list[str]) -> None:
        self._call("terminate", node_ids)

    def terminate_node(self, node_id: str) -> None:
        self._call("terminate", [node_id])

    def _call(self, method: str, *arguments: Any) -> Any:
        with Client(self.provider_config["socket"]) as connection:
            connection.send((method, arguments))
            answer, problem = connection.recv()
        if problem is not None:
            raise RuntimeError(problem)
        return answer


@contextmanager
def cloud(shared: Path, *, machines: int, idle_s: float = 3) -> Iterator[Cloud]:
    """Have a cluster of one node with one CPU, to which Ray's autoscaler adds nodes like it.

    Args:
        shared: the directory that all hosts see.
        machines: how many the cloud has, besides the head's.
        idle_s: seconds after which the autoscaler gives an idle node back.
    """
    config, socket = shared / "autoscaler.json", shared / "cloud"
    provider = {
        "type": "external",
        "module": f"{__name__}.{HostProvider.__name__}",
        "socket": str(socket),
        "disable_node_updaters": True,
        "disable_launch_config_check": True,
    }
    added = {"resources": {"CPU": 1}, "max_workers": machines}
    content = autoscaling_config(provider, head=_HEAD, added=added, idle_s=idle_s)
    config.write_text(json.dumps(content))
    with Listener(str(socket)) as listener, hosts(machines + 1, shared=shared) as (head, *spare):
        found = Cloud(head=head, address="", spare=spare)
        serving = threading.Thread(target=found.serve, args=(listener,), daemon=True)
        serving.start()
        environment = {
            **_named(_HEAD, _HEAD),
            "RAY_enable_autoscaler_v2": "1",
            "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        }
        found.address = ray_on(head, cpus=1, env=environment, autoscaling_config=config)
        try:
            yield found
        finally:
            for host in (head, *spare):
                host.kill()
            for thread in found._threads:
                thread.join()


def _named(machine: str, node_type: str) -> dict[str, str]:
    """Variables of the Ray of a machine, by which the autoscaler knows it."""
    return {
        "RAY_CLOUD_INSTANCE_ID": machine,
        "RAY_NODE_TYPE_NAME": node_type,
        "PYTHONPATH": _PYTHONPATH,
    }
