"""What the driver sends to thousands of hosts, counted without Ray."""

from __future__ import annotations

import pickle
import queue
from collections.abc import Coroutine, Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest

from polytrain.checkpoint.manifest import AttemptId
from polytrain.checkpoint.starting_point import StartingPoint
from polytrain.policy.placement import NodeAddress, members
from polytrain.workers.agents.agent_host import AgentHandle
from polytrain.workers.agents.calls import (
    AgentCall,
    LaunchProcess,
    RankAssignment,
    SendRoster,
)
from polytrain.workers.ray import launcher as module
from polytrain.workers.session.job import LaunchOrder
from polytrain_plugins import Offer

PER_HOST = 8


class Reference:
    """What Ray sends in place of an object that it holds."""

    def __init__(self, key: int) -> None:
        self.key = key


class Cluster:
    """Hosts that only keep what they are sent."""

    def __init__(self, hosts: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.held: list[Any] = []
        self.sent = 0
        """Bytes that the driver has pickled."""

        self.got: dict[int, tuple[AgentCall, RankAssignment | None]] = {}
        """Number of an agent → its last call, and the rank that it gets with it."""

        monkeypatch.setattr(module, "ray", SimpleNamespace(put=self.put))
        monkeypatch.setattr(module, "AgentBundles", lambda **_: None)
        self.launcher = module.RayAgentLauncher(
            spec=cast(Any, None),
            job=b"",
            resources={"CPU": 1},
            spread=False,
            shares_hosts=True,
            mailbox=queue.SimpleQueue(),
            _loop=cast(Any, SimpleNamespace(submit=Coroutine.close)),
        )
        self.agents = [AgentHandle(number=n, bundle=n) for n in range(hosts * PER_HOST)]
        for first in range(0, len(self.agents), PER_HOST):
            its = {each.number: each for each in self.agents[first : first + PER_HOST]}
            host = module._Host(
                actor=SimpleNamespace(call=SimpleNamespace(remote=self.call)),
                agents=its,
                node=f"node-{first}",
            )
            self.launcher._hosts.update(dict.fromkeys(its, host))

    def put(self, value: Any) -> Reference:
        self.held.append(pickle.loads(self._pickled(value)))
        return Reference(len(self.held) - 1)

    def call(self, call: Any, assignments: Mapping[int, RankAssignment | None]) -> None:
        call, assignments = pickle.loads(self._pickled((call, assignments)))
        if isinstance(call, Reference):
            call = self.held[call.key]
        self.got |= {number: (call, own) for number, own in assignments.items()}

    def _pickled(self, value: Any) -> bytes:
        pickled = pickle.dumps(value)
        self.sent += len(pickled)
        return pickled


def restart(hosts: int, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """Send what an attempt begins with to every rank; the second agent alone keeps its rank."""
    cluster = Cluster(hosts, monkeypatch)
    places = [NodeAddress(node_id=f"{n // PER_HOST}", host="10.0.0.1") for n in range(hosts * 8)]
    order = LaunchOrder(
        attempt_id=AttemptId(token=1, attempt=0),
        members=members(places, cpus=1, gpus=0),
        start=StartingPoint(),
        first_checkpoint=0,
    )
    world_size = len(cluster.agents)
    launch = LaunchProcess(order=order, streams=())
    assignments = {
        agent: None if rank == 1 else RankAssignment(rank=rank, world_size=world_size, data=None)
        for rank, agent in enumerate(cluster.agents)
    }
    cluster.launcher.call(launch, assignments)
    assert cluster.got == {each.number: (launch, own) for each, own in assignments.items()}
    offers = tuple(Offer(host="10.0.0.1", port=20_000) for _ in cluster.agents)
    roster = SendRoster(attempt=0, offers=offers)
    cluster.launcher.call(roster, dict.fromkeys(cluster.agents))
    assert cluster.got == {agent.number: (roster, None) for agent in cluster.agents}
    return cluster


def test_an_attempt_of_more_workers_sends_no_more_to_each(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = (restart(hosts, monkeypatch) for hosts in (16, 64))
    assert many.sent <= 4.4 * few.sent


def test_a_few_hosts_get_their_calls_without_rays_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reference would have to be fetched first, which a restart would wait for."""
    assert restart(2, monkeypatch).held == [b""], "the job alone"
