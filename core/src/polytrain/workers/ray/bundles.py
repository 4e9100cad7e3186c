"""Reserves resources for agents on Ray: bundles of the run's placement group, or own groups.

A run of a fixed size reserves all of its bundles at once. Any other agent, on standby or in an
elastic run, has its own group of one bundle, which Ray places when there is room.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ray.util.placement_group import placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from polytrain.policy.labels import without
from polytrain.ray_api.state import living_nodes
from polytrain.workers.ray.reservation import Guard, Reservation


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bundle:
    """An agent's bundle."""

    reservation: Reservation
    index: int
    is_own: bool
    """Whether the group has no other bundle."""


@dataclass(slots=True, kw_only=True)
class AgentBundles:
    """The bundles of a run's agents. Its methods may be called from any thread."""

    resources: Mapping[str, float]
    """The resources of one agent."""

    labels: Sequence[Mapping[str, str]] = ()
    """Label selectors of the nodes: one for all agents, or one for each bundle of the run's group;
    empty for any node."""

    _name: str = field(default_factory=lambda: f"polytrain-{secrets.token_hex(8)}")
    _group: Reservation | None = None
    """The run's placement group."""

    _bundles: dict[int, _Bundle] = field(default_factory=dict)
    """Number of the agent → its bundle."""

    _kept: list[tuple[str, Reservation]] = field(default_factory=list)
    """Nodes and own groups of agents that were lost."""

    _lock: threading.Lock = field(default_factory=threading.Lock)
    _guard: Guard = field(init=False)

    def __post_init__(self) -> None:
        self._guard = Guard(self._name)

    def reserve(self, count: int, strategy: str) -> None:
        """Reserve the bundles of a run of a fixed size, all or nothing."""
        labels = self.labels if len(self.labels) == count else [*self.labels] * count
        self._group = Reservation(self._name, self.resources, count, strategy, labels=labels)

    def not_on(self, nodes: Iterable[str]) -> dict[str, str]:
        """Return the label selector of an agent outside the run's group, which excludes nodes."""
        return without(self.labels[0] if self.labels else {}, nodes)

    def sizes(self) -> dict[str, int]:
        """Return the identifiers of the agents' groups, with their numbers of bundles."""
        with self._lock:
            own = {bundle.reservation for bundle in self._bundles.values()}
            groups = own if self._group is None else {*own, self._group}
        return {each.group.id.hex(): each.group.bundle_count for each in groups}

    def in_group(self, bundle: int) -> PlacementGroupSchedulingStrategy:
        """Return the strategy that places an actor in a bundle of the run's group."""
        assert self._group is not None
        return PlacementGroupSchedulingStrategy(
            placement_group=self._group.group, placement_group_bundle_index=bundle
        )

    def request(self, number: int, *, bundle: int | None, avoid: Iterable[str]) -> None:
        """Assign a bundle to an agent.

        Args:
            number: number of the agent.
            bundle: a bundle of the run's group; None for an own group.
            avoid: nodes to exclude for an own group.
        """
        if bundle is not None:
            assert self._group is not None
            found = _Bundle(reservation=self._group, index=bundle, is_own=False)
        else:
            own = self._kept_one(avoid) or Reservation(
                f"{self._name}-{number}",
                self.resources,
                1,
                "PACK",
                labels=[self.not_on(avoid)],
            )
            found = _Bundle(reservation=own, index=0, is_own=True)
        with self._lock:
            self._bundles[number] = found

    def _kept_one(self, avoid: Iterable[str]) -> Reservation | None:
        """Return a lost agent's group for reuse; free those on nodes to avoid."""
        with self._lock:
            avoided = [group for node, group in self._kept if node in avoid]
            self._kept = [(node, group) for node, group in self._kept if node not in avoid]
            kept = self._kept.pop(0)[1] if self._kept else None
        for group in avoided:
            group.free()
        return kept

    def placed(self, numbers: Iterable[int]) -> dict[int, str]:
        """Return number → node of those agents whose bundles Ray has placed.

        Bundles of a lost node are left out until Ray has placed them again.
        """
        with self._lock:
            wanted = {number: self._bundles.get(number) for number in numbers}
        table: dict[str, dict[str, Any]] = placement_group_table()
        nodes = {}
        for number, bundle in wanted.items():
            group = table.get(bundle.reservation.group.id.hex(), {}) if bundle else {}
            if bundle and group.get("state") == "CREATED":
                nodes[number] = group["bundles_to_node_id"].get(bundle.index)
        alive = living_nodes() if nodes else {}
        return {number: node for number, node in nodes.items() if node in alive}

    def release(self, number: int) -> None:
        """Free an agent's own group, if it has one. The run's group is kept for the next agent."""
        with self._lock:
            bundle = self._bundles.pop(number, None)
        if bundle is not None and bundle.is_own:
            bundle.reservation.free()

    def keep(self, number: int, node: str) -> None:
        """Keep a lost agent's own group for the next agent, before others get its resources.

        Args:
            number: number of the agent.
            node: node of its bundle. If the node is lost, Ray places the bundle on another one.
        """
        with self._lock:
            bundle = self._bundles.pop(number, None)
            if bundle is not None and bundle.is_own:
                self._kept.append((node, bundle.reservation))

    def free(self) -> None:
        """Free all groups."""
        for number in list(self._bundles):
            self.release(number)
        for _, group in self._kept:
            group.free()
        if self._group is not None:
            self._group.free()
        self._guard.close()
