"""Reserves resources for agents on Ray: bundles of the run's placement group, or own groups.

A run of a fixed size reserves all of its bundles at once. Those on a node that is lost, or that the
run leaves, can move to another group: Ray itself moves a bundle only when it is sure that the node
is dead, which takes it about a minute if the node is silent. Any other agent, on standby or in an
elastic run, has its own group of one bundle, which Ray places when there is room.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ray.util.placement_group import placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from polytrain.policy.labels import without
from polytrain.ray_api.state import living_nodes
from polytrain.workers.driver.group import Bundles
from polytrain.workers.ray.reservation import Guard, Reservation


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bundle:
    """An agent's bundle."""

    reservation: Reservation
    index: int
    is_own: bool = False
    """Whether it is the only one of a group outside the run's."""

    avoid: frozenset[str] = frozenset()
    """The nodes to avoid for such a group."""

    silent: frozenset[str] = frozenset()
    """The nodes that such a group excludes because they were silent."""


@dataclass(slots=True, kw_only=True)
class AgentBundles(Bundles):
    """The bundles of a run's agents. Its methods may be called from any thread."""

    resources: Mapping[str, float]
    """The resources of one agent."""

    labels: Sequence[Mapping[str, str]] = ()
    """Label selectors of the nodes: one for all agents, or one for each bundle of the run's group;
    empty for any node."""

    _name: str = field(default_factory=lambda: f"polytrain-{secrets.token_hex(8)}")
    _run: dict[int, _Bundle] = field(default_factory=dict)
    """The run's bundles, by their numbers."""

    _left: list[_Bundle] = field(default_factory=list)
    """Bundles that agents have left by a move. Ray reserves them with the rest of their group, and
    places those of a dead node again."""

    _moved_from: dict[int, _Bundle] = field(default_factory=dict)
    """Where the bundles that have moved were before."""

    _bundles: dict[int, _Bundle] = field(default_factory=dict)
    """Number of the agent → its bundle."""

    _reserved: dict[Reservation, tuple[str, Collection[str]]] = field(default_factory=dict)
    """The groups of the run's bundles → their placement strategy, and the nodes to exclude."""

    _kept: list[tuple[str, Reservation]] = field(default_factory=list)
    """Nodes and own groups of agents that were lost."""

    _silent: set[str] = field(default_factory=set)
    """Nodes that don't answer, although Ray doesn't know yet that they are lost."""

    _lock: threading.Lock = field(default_factory=threading.Lock)
    _guard: Guard = field(init=False)

    def __post_init__(self) -> None:
        self._guard = Guard(self._name)

    def reserve(self, bundles: int, strategy: str) -> None:
        """Reserve the bundles of a run of a fixed size, all or nothing."""
        self._run = self._group_of(range(bundles), self._name, strategy, ())

    def move(self, bundles: Collection[int], strategy: str, avoid: frozenset[str]) -> None:
        """Reserve other room for bundles of the run; see `Bundles.move`."""
        idle = self._idle(len(bundles), strategy, avoid)
        with self._lock:
            before = {bundle: self._run[bundle] for bundle in bundles}
            if idle:
                self._run.update(zip(bundles, idle, strict=True))
            else:
                name = self._name_of_moved()
                self._run.update(self._group_of(bundles, name, strategy, avoid))
            self._moved_from.update(before)
            self._left = [each for each in self._left if each not in idle] + [*before.values()]

    def move_back(self, bundles: Collection[int]) -> frozenset[int]:
        """Undo moves to room that Ray hasn't found; see `Bundles.move_back`.

        For the others of their group less room is requested then.
        """
        table: dict[str, dict[str, Any]] = placement_group_table()
        with self._lock:
            back = {
                bundle: self._moved_from.pop(bundle)
                for bundle in bundles
                if bundle in self._moved_from and _node_in(table, self._run[bundle]) is None
            }
            abandoned = [self._run[bundle] for bundle in back]
            self._run.update(back)
            self._left = [each for each in self._left if each not in back.values()] + abandoned
            rest = self._request_less(
                {each.reservation for each in abandoned if _is_pending(table, each)}
            )
        self.free_unused()
        return frozenset(back) | rest

    def _request_less(self, groups: Iterable[Reservation]) -> frozenset[int]:
        """Replace groups that wait for room for more bundles than use them; return the bundles."""
        replaced: set[int] = set()
        for group in groups:
            rest = [bundle for bundle, its in self._run.items() if its.reservation is group]
            if rest:
                strategy, avoid = self._reserved[group]
                self._run.update(self._group_of(rest, self._name_of_moved(), strategy, avoid))
                replaced.update(rest)
        return frozenset(replaced)

    def _name_of_moved(self) -> str:
        return f"{self._name}-moved-{secrets.token_hex(4)}"

    def free_unused(self) -> None:
        """Free groups none of whose bundles the run uses."""
        with self._lock:
            used = {bundle.reservation for bundle in self._run.values()}
            unused = self._reserved.keys() - used
            self._left = [each for each in self._left if each.reservation in used]
            self._moved_from = {
                n: each for n, each in self._moved_from.items() if each.reservation in used
            }
            for group in unused:
                del self._reserved[group]
        for group in unused:
            group.free()

    def _group_of(
        self, bundles: Collection[int], name: str, strategy: str, avoid: Collection[str]
    ) -> dict[int, _Bundle]:
        """Reserve a group for bundles of the run."""
        group = Reservation(
            name,
            self.resources,
            len(bundles),
            strategy,
            labels=[self._not_on(avoid, bundle) for bundle in bundles],
        )
        self._reserved[group] = strategy, avoid
        return {
            bundle: _Bundle(reservation=group, index=index) for index, bundle in enumerate(bundles)
        }

    def _idle(self, count: int, strategy: str, avoid: Collection[str]) -> list[_Bundle]:
        """Return bundles that were left, and that Ray has placed again since; all or none.

        Without them, each lost node would cost the run more room until its end.
        """
        with self._lock:
            left = list(self._left)
        if len(left) < count or len(self.labels) > 1:
            return []
        table: dict[str, dict[str, Any]] = placement_group_table()
        alive = living_nodes().keys() - {*avoid, *self._silent}
        placed = {each: node for each in left if (node := _node_in(table, each)) in alive}
        # Of each node at most one, in the strictest case.
        found = [*{node: each for each, node in placed.items()}.values()]
        if strategy != "STRICT_SPREAD":
            found = [*placed]
        return found[:count] if len(found) >= count else []

    def not_on(self, nodes: Iterable[str]) -> dict[str, str]:
        """Return the label selector of an agent outside the run's group, which excludes nodes."""
        return self._not_on(nodes, 0)

    def _not_on(self, nodes: Iterable[str], bundle: int) -> dict[str, str]:
        own = self.labels[bundle % len(self.labels)] if self.labels else {}
        return without(own, nodes)

    def sizes(self) -> dict[str, int]:
        """Return the identifiers of the agents' groups, with their numbers of bundles."""
        with self._lock:
            bundles = (*self._bundles.values(), *self._run.values())
            groups = {bundle.reservation for bundle in bundles}
        return {each.group.id.hex(): each.group.bundle_count for each in groups}

    def strategy_of(self, number: int) -> PlacementGroupSchedulingStrategy | None:
        """Return the strategy that places an actor in an agent's bundle; None if it has none."""
        with self._lock:
            found = self._bundles.get(number)
        if found is None:
            return None
        return PlacementGroupSchedulingStrategy(
            placement_group=found.reservation.group, placement_group_bundle_index=found.index
        )

    def request(self, number: int, *, bundle: int | None, avoid: Iterable[str]) -> None:
        """Assign a bundle to an agent.

        Args:
            bundle: a bundle of the run; None for an own group.
            avoid: nodes to exclude for an own group.
        """
        if bundle is not None:
            with self._lock:
                found = self._run[bundle]
        else:
            found = self._kept_one(avoid) or self._own(number, frozenset(avoid))
        with self._lock:
            self._bundles[number] = found

    def shun(self, node: str) -> None:
        """Place no more agents on a node, which doesn't answer."""
        with self._lock:
            self._silent.add(node)

    def readmit(self, node: str) -> None:
        """Place agents on a node that answers again."""
        with self._lock:
            self._silent.discard(node)

    def excluded(self, number: int) -> frozenset[str]:
        """Return the nodes that an agent's request excludes because they are silent."""
        with self._lock:
            bundle = self._bundles.get(number)
            return frozenset(self._silent) if bundle is None else bundle.silent

    def renew(self, numbers: Iterable[int]) -> None:
        """Request the groups anew that exclude a node which has been silent and answers again.

        Args:
            numbers: the agents that wait for their bundles.
        """
        with self._lock:
            for number in numbers:
                bundle = self._bundles.get(number)
                if bundle is not None and bundle.silent - self._silent:
                    bundle.reservation.free()
                    self._bundles[number] = self._own(number, bundle.avoid)

    def _own(self, number: int, avoid: frozenset[str]) -> _Bundle:
        """Reserve a group of one bundle for an agent."""
        silent = frozenset(self._silent)
        # Names are unique, and an agent may have several groups, one after the other.
        name = f"{self._name}-{number}-{secrets.token_hex(4)}"
        labels = [self.not_on(avoid | silent)]
        own = Reservation(name, self.resources, 1, "PACK", labels=labels)
        return _Bundle(reservation=own, index=0, is_own=True, avoid=avoid, silent=silent)

    def _kept_one(self, avoid: Iterable[str]) -> _Bundle | None:
        """Return a lost agent's group for reuse; free those on nodes that can't be used."""
        with self._lock:
            avoided = {*avoid, *self._silent}
            freed = [group for node, group in self._kept if node in avoided]
            self._kept = [(node, group) for node, group in self._kept if node not in avoided]
            kept = self._kept.pop(0)[1] if self._kept else None
        for group in freed:
            group.free()
        return None if kept is None else _Bundle(reservation=kept, index=0, is_own=True)

    def placed(self, numbers: Iterable[int]) -> dict[int, str]:
        """Return number → node of those agents whose bundles Ray has placed.

        Bundles of a lost node are left out until Ray has placed them again, and those of a silent
        node until it answers.
        """
        with self._lock:
            wanted = {number: self._bundles.get(number) for number in numbers}
        table: dict[str, dict[str, Any]] = placement_group_table()
        nodes = {}
        for number, bundle in wanted.items():
            node = _node_in(table, bundle) if bundle else None
            if node is not None:
                nodes[number] = node
        alive = living_nodes() if nodes else {}
        usable = alive.keys() - self._silent
        return {number: node for number, node in nodes.items() if node in usable}

    def release(self, number: int) -> None:
        """Free an agent's own group, if it has one. Bundles of the run are kept for the next."""
        with self._lock:
            bundle = self._bundles.pop(number, None)
        if bundle is not None and bundle.is_own:
            bundle.reservation.free()

    def keep(self, number: int, node: str) -> None:
        """Keep a lost agent's own group for the next agent, before others get its resources.

        Args:
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
        self._run.clear()
        self.free_unused()
        self._guard.close()


def _group_in(table: Mapping[str, dict[str, Any]], bundle: _Bundle) -> dict[str, Any]:
    """Return what Ray's table says of a bundle's group; empty if it is gone."""
    return table.get(bundle.reservation.group.id.hex(), {})


def _is_pending(table: Mapping[str, dict[str, Any]], bundle: _Bundle) -> bool:
    """Return whether a bundle's group has had no room yet."""
    return _group_in(table, bundle).get("state") == "PENDING"


def _node_in(table: Mapping[str, dict[str, Any]], bundle: _Bundle) -> str | None:
    """Return the node on which Ray has placed a bundle, by its table; None if it hasn't.

    While Ray looks for other room for the bundles of a dead node, those of other nodes stay.
    """
    group = _group_in(table, bundle)
    if group.get("state") not in ("CREATED", "RESCHEDULING"):
        return None
    node: str | None = group["bundles_to_node_id"].get(bundle.index)
    return node or None
