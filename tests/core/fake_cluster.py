"""A cluster in a test's hands: agents arrive where there is room, when the test says so."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from polytrain.config.configs import ScalingConfig
from polytrain.errors import FailureKind
from polytrain.events.attempt import AgentLost, AgentsPlaced, DrainWanted, Event, PlacementFailed
from polytrain.policy.autoscaling import Outlook
from polytrain.policy.placement import NodeAddress
from polytrain.policy.scaling import Starting
from polytrain.workers.agents.agent_host import AgentHandle, Gone
from polytrain.workers.driver.group import Bundles
from polytrain.workers.driver.worker_pool import WorkerPool


class FakeCluster(Bundles):
    """Nodes with CPUs, agents of one CPU each that were asked for, and a clock."""

    def __init__(self, **nodes: int) -> None:
        """
        Args:
            nodes: name → CPUs.
        """
        self.bundles = self
        self.nodes = dict(nodes)
        self.now = 0.0
        self.waiting: dict[AgentHandle, frozenset[str]] = {}
        """Agents that have no place yet, with the nodes on which they mustn't be."""

        self.others: dict[str, int] = {}
        """CPUs of each node that others use."""

        self.placed: list[AgentHandle] = []
        """Agents that have one and live."""

        self.dismissed: list[AgentHandle] = []
        self._numbers = itertools.count()
        self.events: list[Event] = []
        """What the pool has said."""

        self.links_tried_of: list[list[str]] = []
        """Nodes whose connections were to be tried."""

        self.says: Outlook | None = None
        """What its autoscaler says."""

        self.sets_up: str | None = None
        """What it sets up for agents that have their room."""

        self.starts_on: tuple[str, ...] = ()
        """The node of each agent that has its room, and starts."""

        self._bundles: list[str | None] = []
        """Where room is held; what was held on a node that is gone is to be held elsewhere."""

        self._left: dict[int, str | None] = {}
        """Where room is held for the bundles that have moved, besides."""

        self._not_on: dict[int, frozenset[str]] = {}
        """Where bundles that have moved mustn't be."""

        self.rivals: dict[str, int] = {}
        """CPUs of each node that others use just before room moves there."""

        self.silent: set[str] = set()
        """Nodes that are gone without the cluster's knowledge: nobody arrives there."""

    def pool(
        self, num_workers: int | tuple[int, int], *, tries_links: bool = False, **scaling: Any
    ) -> WorkerPool:
        """A pool of this cluster."""
        return WorkerPool(
            ScalingConfig(num_workers=num_workers, **scaling),
            launcher=self,
            cluster=self,
            first_node="a",
            tell=self.events.append,
            tries_links=tries_links,
            clock=lambda: self.now,
        )

    def living_nodes(self) -> Mapping[str, Mapping[str, float]]:
        return {name: {"CPU": float(cpus)} for name, cpus in self.nodes.items()}

    def free_nodes(self) -> Mapping[str, Mapping[str, float]]:
        return {name: {"CPU": float(self._free(name))} for name in self.nodes}

    def reserve(self, bundles: int, strategy: str) -> None:
        self._bundles = [None] * bundles
        self._hold_room()

    def ask(self, *, bundle: int | None = None, avoid: frozenset[str] = frozenset()) -> AgentHandle:
        agent_handle = AgentHandle(number=next(self._numbers), bundle=bundle)
        self.waiting[agent_handle] = avoid
        return agent_handle

    def move(self, bundles: Collection[int], strategy: str, avoid: frozenset[str]) -> None:
        self.others.update(self.rivals)
        for bundle in bundles:
            self._left[bundle] = self._bundles[bundle]
            self._bundles[bundle] = None
            self._not_on[bundle] = avoid
        self._hold_room()

    def move_back(self, bundles: Collection[int]) -> frozenset[int]:
        back = {bundle for bundle in bundles if self._bundles[bundle] is None}
        for bundle in back:
            self._bundles[bundle] = self._left.pop(bundle)
            del self._not_on[bundle]
        return frozenset(back)

    def free_unused(self) -> None:
        if len(self._left) == len(self._bundles):
            self._left.clear()

    def held(self) -> list[str | None]:
        """Where room is held for bundles, those that have moved twice."""
        return [*self._bundles, *self._left.values()]

    def starting(self) -> Starting:
        return Starting(hosts=self.starts_on, setup=self.sets_up)

    def try_links(self, agent_handles: Sequence[AgentHandle]) -> None:
        self.links_tried_of.append(sorted({each.place.node_id for each in agent_handles}))

    def outlook(self) -> Outlook | None:
        return self.says

    def dismiss(self, agent_handle: AgentHandle) -> None:
        self.dismissed.append(agent_handle)
        self.waiting.pop(agent_handle, None)
        if agent_handle in self.placed:
            self.placed.remove(agent_handle)

    def settle(self, pool: WorkerPool) -> None:
        """Everybody who finds a place arrives, until nobody does any more."""
        self._hold_room()
        while arriving := next(
            ((r, node) for r in self.waiting if (node := self._place_of(r)) is not None), None
        ):
            self.arrive(pool, *arriving)

    def arrive(
        self,
        pool: WorkerPool,
        agent_handle: AgentHandle,
        node: str,
        *,
        unusable: str | None = None,
        other_versions: tuple[str, ...] = (),
    ) -> None:
        """An agent is there."""
        self.waiting.pop(agent_handle, None)
        self.placed.append(agent_handle)
        place = NodeAddress(
            node_id=node, host=node, unusable=unusable, other_versions=other_versions
        )
        pool.arrived(agent_handle, place)

    def lose(
        self,
        pool: WorkerPool,
        agent_handle: AgentHandle,
        kind: FailureKind = FailureKind.AGENT_LOST,
        *,
        node: str | None = None,
        node_may_return: bool = False,
    ) -> AgentLost | None:
        """An agent is gone."""
        if agent_handle in self.placed:
            self.placed.remove(agent_handle)
        self.waiting.pop(agent_handle, None)
        return pool.lost(
            Gone(
                agent_handle=agent_handle,
                kind=kind,
                reason="it has died",
                node=node,
                node_may_return=node_may_return,
            )
        )

    def lose_node(self, pool: WorkerPool, name: str) -> list[AgentLost]:
        """A node is gone, with all agents on it."""
        del self.nodes[name]
        there = [agent_handle for agent_handle in self.placed if agent_handle.place.node_id == name]
        messages = [self.lose(pool, agent_handle, FailureKind.NODE_LOST) for agent_handle in there]
        return [event for event in messages if event is not None]

    def silence(
        self, pool: WorkerPool, name: str, *, node_may_return: bool = False
    ) -> list[AgentLost]:
        """A node is gone, and only its agents tell so: the cluster takes it for alive."""
        self.silent.add(name)
        there = [each for each in self.placed if each.place.node_id == name]
        messages = [
            self.lose(pool, each, FailureKind.NODE_LOST, node_may_return=node_may_return)
            for each in there
        ]
        return [event for event in messages if event is not None]

    def answer(self, pool: WorkerPool, name: str) -> None:
        """A node that was silent answers again, and agents arrive there."""
        self.silent.remove(name)
        pool.returned(name)
        self.settle(pool)

    def sizes(self) -> list[int]:
        """How many ranks each pool had that was told to be complete."""
        return [len(event.nodes) for event in self.events if isinstance(event, AgentsPlaced)]

    def failures(self) -> list[str]:
        return [event.reason for event in self.events if isinstance(event, PlacementFailed)]

    def growths(self) -> list[str]:
        return [event.reason for event in self.events if isinstance(event, DrainWanted)]

    def _hold_room(self) -> None:
        """Find nodes for all bundles that have none, or for none of them."""
        self._left = {n: node if node in self.nodes else None for n, node in self._left.items()}
        for moved in (False, True):
            avoid = frozenset[str]().union(*self._not_on.values()) if moved else frozenset()
            free = [n for n in self.nodes if n not in avoid for _ in range(self._free(n))]
            homeless = [
                n
                for n, node in enumerate(self._bundles)
                if node not in self.nodes and (n in self._not_on) is moved
            ]
            if len(free) >= len(homeless):
                for bundle, node in zip(homeless, free, strict=False):
                    self._bundles[bundle] = node

    def hold_room_of_the_lost_first(self) -> None:
        """The cluster has noticed, and finds other room for what a dead node held."""
        for bundle, node in self._left.items():
            if node not in self.nodes:
                free = [name for name in self.nodes if self._free(name) > 0]
                self._left[bundle] = free[0] if free else None

    def _free(self, node: str) -> int:
        outside = [r for r in self.placed if r.place.node_id == node and r.bundle is None]
        taken = len(outside) + self.held().count(node) + self.others.get(node, 0)
        return self.nodes[node] - taken

    def _place_of(self, agent_handle: AgentHandle) -> str | None:
        if agent_handle.bundle is not None:
            node = self._bundles[agent_handle.bundle]
            is_taken = any(placed.bundle == agent_handle.bundle for placed in self.placed)
            return node if node in self._answering and not is_taken else None
        avoid = self.waiting[agent_handle]
        return next((n for n in self._answering if n not in avoid and self._free(n) > 0), None)

    @property
    def _answering(self) -> list[str]:
        return [node for node in self.nodes if node not in self.silent]
