"""One rank of a local world: runs a worker process, and reports what it leaves behind."""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from polytrain.data.shards.opening import open_shards
from polytrain.testing.processes import eventually
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
    # A library's own thread may be just about to close what it listened on.
    eventually(lambda: not _Traces.now().beyond(before)["ports"], seconds=2)
    channel.send(["left", _Traces.now().beyond(before)])
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Traces:
    """Ports and variables of a process."""

    ports: frozenset[int]
    environment: Mapping[str, str]

    @classmethod
    def now(cls) -> _Traces:
        connections = psutil.Process().net_connections(kind="tcp")
        listening = (c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN)
        return cls(ports=frozenset(listening), environment=dict(os.environ))

    def beyond(self, before: _Traces) -> dict[str, list[Any]]:
        names = {*self.environment, *before.environment}
        changed = [n for n in names if self.environment.get(n) != before.environment.get(n)]
        return {"ports": sorted(self.ports - before.ports), "variables": sorted(changed)}
