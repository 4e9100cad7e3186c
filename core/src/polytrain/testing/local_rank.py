"""One rank of a local world: runs a worker process, and reports what it leaves behind."""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polytrain.data.shards.opening import open_shards
from polytrain.testing.functions import helpers, listening_ports
from polytrain.testing.processes import eventually, title
from polytrain.workers.processes.channel import SocketChannel
from polytrain.workers.session.worker_process import run_worker


def main(connection: socket.socket, descriptors: Sequence[int]) -> int:
    """Run the rank that the first message describes; return the exit code."""
    channel = SocketChannel(connection)
    _, start = channel.receive()
    job, order, rank, spec, table, path = pickle.loads(start)
    # The framework's import may set variables and start threads; the engine isn't to blame.
    job.spec.backend.engine()
    before = _Traces.now()
    run_worker(
        job=job,
        order=order,
        rank=rank,
        shards=lambda: open_shards(
            [spec], iter([table]), {}, world_size=len(order.members), rank=rank
        ),
        channel=channel,
        scratch=path,
    )
    # A library's own thread may be just about to close what it listened on, or a helper to end.
    eventually(lambda: not _Traces.now().are_left(before), seconds=2)
    channel.send(["left", _Traces.now().beyond(before)])
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Traces:
    """Ports, variables and helpers of a process."""

    ports: frozenset[int]
    environment: Mapping[str, str]
    helpers: Mapping[int, str]
    """Process id → command line."""

    @classmethod
    def now(cls) -> _Traces:
        return cls(
            ports=frozenset(listening_ports()),
            environment=dict(os.environ),
            helpers={process.pid: title(process) for process in helpers()},
        )

    def are_left(self, before: _Traces) -> bool:
        """Whether ports or helpers are left."""
        left = self.beyond(before)
        return bool(left["ports"] or left["processes"])

    def beyond(self, before: _Traces) -> dict[str, list[Any]]:
        names = {*self.environment, *before.environment}
        changed = [n for n in names if self.environment.get(n) != before.environment.get(n)]
        started = self.helpers.keys() - before.helpers.keys()
        return {
            "ports": sorted(self.ports - before.ports),
            "variables": sorted(changed),
            "processes": sorted(self.helpers[pid] for pid in started),
        }
