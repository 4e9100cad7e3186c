"""What a launcher does about nodes that are silent or lost, with hosts that the test plays."""

from __future__ import annotations

import asyncio
import queue
import socket
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from tests.unit.workers.agents.agent_specs import agent_spec

pytest.importorskip("ray")

from ray.exceptions import ActorDiedError, RayError

from polytrain.policy.placement import NodeAddress
from polytrain.ray_api import state
from polytrain.workers.agents.agent_host import AgentReady, Arrived, Delivery, Gone, NodeReturned
from polytrain.workers.ray import bundles, launcher, losses
from polytrain.workers.ray.launcher import RayAgentLauncher

PLACE = NodeAddress(node_id="c", host="10.0.0.3")


class Host:
    """A host actor, and the resources with which it was requested."""

    def __init__(self, numbers: list[int], **options: Any) -> None:
        self.numbers = numbers
        self.options = options
        self.where: Future[NodeAddress] = Future()
        self.end: Future[RayError] = Future()
        self.place = SimpleNamespace(remote=lambda: asyncio.wrap_future(self.where))
        self.events = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self._mail))
        self.end_all = Mock()
        self.told: Future[None] = Future()
        """Done when all its mail was read."""

    async def _mail(self) -> AsyncIterator[Future[list[tuple[int, Any]]]]:
        ready = AgentReady(place=PLACE)
        mail = asyncio.get_running_loop().create_future()
        mail.set_result([(number, ready) for number in self.numbers])
        yield mail
        self.told.set_result(None)
        raise await asyncio.wrap_future(self.end)


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> list[Host]:
    """The hosts that were requested, in order."""
    found: list[Host] = []

    class Actor:
        @staticmethod
        def options(**options: Any) -> SimpleNamespace:
            def remote(spec: object, job: object, numbers: list[int]) -> Host:
                found.append(Host(numbers, **options))
                return found[-1]

            return SimpleNamespace(remote=remote)

    monkeypatch.setattr(launcher, "_HostActor", Actor)
    monkeypatch.setattr(launcher, "ray", Mock())
    for module in (launcher, losses):
        monkeypatch.setattr(module, "death_of_node", lambda _: None)
    for module in (losses, state):
        monkeypatch.setattr(module, "raylet_addresses", lambda: {"c": ("127.0.0.1", 1)})
    monkeypatch.setattr(bundles, "Guard", Mock())
    monkeypatch.setattr(bundles, "living_nodes", lambda: {"b": {}, "c": {}})
    monkeypatch.setattr(bundles, "placement_group_table", dict)
    monkeypatch.setattr(
        bundles, "Reservation", lambda *_, labels=(), **__: Mock(labels=list(labels))
    )
    monkeypatch.setattr(
        bundles, "PlacementGroupSchedulingStrategy", lambda placement_group, **_: placement_group
    )
    return found


@pytest.fixture
def mailbox() -> queue.SimpleQueue[Delivery]:
    return queue.SimpleQueue()


@pytest.fixture
def agents(
    tmp_path: Path, hosts: list[Host], mailbox: queue.SimpleQueue[Delivery]
) -> Iterator[RayAgentLauncher]:
    """A launcher of agents with devices, whose groups are their own."""
    made = RayAgentLauncher(
        spec=agent_spec(tmp_path),
        job=b"job",
        resources={"CPU": 1, "device": 1},
        spread=False,
        shares_hosts=True,
        mailbox=mailbox,
    )
    yield made
    for host in hosts:
        for future in (host.where, host.end):
            if not future.done():
                future.cancel()
    if not made._is_closed:
        made.close(10)


def of_kind(mailbox: queue.SimpleQueue[Delivery], kind: type[Any]) -> Any:
    """The next event of this kind."""
    while True:
        for event in mailbox.get(timeout=10):
            if isinstance(event, kind):
                return event


def test_the_group_of_an_agent_with_devices_is_requested_anew_when_a_node_is_back(
    agents: RayAgentLauncher, hosts: list[Host]
) -> None:
    agents.bundles.shun("c")
    agents.ask()
    agents.readmit("c")
    assert len(hosts) == 2
    first, second = (host.options["scheduling_strategy"] for host in hosts)
    assert second is not first


def test_a_host_that_was_replaced_announces_no_agent(
    agents: RayAgentLauncher, hosts: list[Host], mailbox: queue.SimpleQueue[Delivery]
) -> None:
    """Ray had started it, just before: it ends, and the agent is where its other host is."""
    agents.bundles.shun("c")
    agents.ask()
    agents.readmit("c")
    replaced, its = hosts
    replaced.where.set_result(NodeAddress(node_id="b", host="10.0.0.2"))
    replaced.told.result(10)
    replaced.end.set_result(ActorDiedError())
    its.where.set_result(PLACE)
    its.told.result(10)
    events = [event for _ in range(mailbox.qsize()) for event in mailbox.get()]
    assert [type(event) for event in events] == [NodeReturned, Arrived]


def test_nothing_is_requested_anew_at_the_end(agents: RayAgentLauncher, hosts: list[Host]) -> None:
    agents.bundles.shun("c")
    agents.ask()
    agents.close(0.0)
    agents.readmit("c")
    assert len(hosts) == 1


@pytest.mark.parametrize(
    ("answer", "may_return"), [(ConnectionRefusedError(), False), (TimeoutError(), True)]
)
def test_a_node_whose_raylet_has_ended_is_not_waited_for(
    agents: RayAgentLauncher,
    hosts: list[Host],
    mailbox: queue.SimpleQueue[Delivery],
    monkeypatch: pytest.MonkeyPatch,
    answer: OSError,
    may_return: bool,
) -> None:
    """Only what is silent may answer again. Ray takes both for alive."""
    monkeypatch.setattr(socket, "create_connection", Mock(side_effect=answer))
    agents.ask()
    [host] = hosts
    host.where.set_result(PLACE)
    host.end.set_result(ActorDiedError())
    gone = of_kind(mailbox, Gone)
    assert "its raylet is" in gone.reason
    assert gone.node_may_return is may_return
