"""The state of a run's pool: its agents, its nodes (those lost or avoided), and its bundles."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from polytrain.policy.placement import NodeAddress, Nodes, PlacementPolicy, rank_order
from polytrain.workers.agents.agent_host import AgentHandle
from polytrain.workers.driver.group import Bundles

_DOUBTED_S = 120.0
"""Seconds for which a lost node gets no agents though the cluster takes it for alive. By default
Ray is sure within 66 s; after that it was unreachable only for a while."""


class PoolAgents:
    """The agents of a run: with ranks, on standby, and requested."""

    def __init__(self) -> None:
        self.ranked: list[AgentHandle] = []
        """Those of the last attempt, by rank; some may be gone."""

        self._ranks: dict[AgentHandle, int] = {}
        """The rank of each of `ranked` that isn't gone."""

        self.spares: dict[AgentHandle, None] = {}
        """Those that have arrived and have no rank, in order of their arrival."""

        self.coming: dict[AgentHandle, None] = {}
        """Those that are requested and haven't arrived."""

    @property
    def here(self) -> list[AgentHandle]:
        """Those that have arrived, those with a rank first."""
        return [*self._ranks, *self.spares]

    @property
    def up(self) -> int:
        """The number of those that have arrived; asked after each arrival."""
        return len(self._ranks) + len(self.spares)

    @property
    def nodes(self) -> list[str]:
        """The nodes of those that have arrived, in the same order."""
        return [agent_handle.place.node_id for agent_handle in self.here]

    @property
    def bundles(self) -> set[int | None]:
        """The bundles of all of them."""
        return {agent_handle.bundle for agent_handle in (*self.here, *self.coming)}

    def assign_ranks(self, size: int, first_node: str) -> None:
        """Assign an agent to every rank.

        Args:
            first_node: the node whose workers get the first ranks, if it has any.
        """
        if size == len(self.ranked):
            # A remaining agent keeps its rank, and so its data.
            spares = iter(self.spares)
            self.ranked = [next(spares) if r.is_gone else r for r in self.ranked]
        else:
            chosen = self.here[:size]
            order = rank_order([agent_handle.place for agent_handle in chosen], first_node)
            self.ranked = [chosen[index] for index in order]
        self._ranks = {agent_handle: rank for rank, agent_handle in enumerate(self.ranked)}
        self.spares = {each: None for each in self.spares if each not in self._ranks}

    def forget(self, agent_handle: AgentHandle) -> int | None:
        """Note that an agent is gone; return the rank that it had, if any."""
        self.spares.pop(agent_handle, None)
        self.coming.pop(agent_handle, None)
        return self._ranks.pop(agent_handle, None)


@dataclass(slots=True, kw_only=True)
class LostNodes:
    """The lost nodes of one run.

    Each agent of a node is reported by itself, some only after the next launch. Until then none of
    them may get a rank.
    """

    living: Callable[[], Mapping[str, object]]
    """Returns the nodes that the cluster takes for alive."""

    clock: Callable[[], float]
    """A monotonic clock, in seconds."""

    _lost_at: dict[str, float] = field(default_factory=dict)
    _hosts: dict[str, str] = field(default_factory=dict)
    """Their addresses."""

    _silent: set[str] = field(default_factory=set)

    def add(self, place: NodeAddress, *, may_return: bool) -> bool:
        """Note that an agent's node is lost; return whether that is news.

        Args:
            may_return: whether the launcher uses it again once it answers, and not before.
        """
        node = place.node_id
        is_news = node not in self._lost_at
        self._lost_at[node] = self.clock()
        self._hosts[node] = place.host
        if may_return:
            self._silent.add(node)
        return is_news

    def remove(self, node: str) -> None:
        """Note that a node can be used: it was unreachable only for a while."""
        self._lost_at.pop(node, None)
        self._silent.discard(node)

    @property
    def silent(self) -> frozenset[str]:
        """Those that requests needn't exclude, because the launcher does while they are silent."""
        return frozenset(self._silent)

    def recent(self) -> frozenset[str]:
        """Return those that get no agents: all but those lost long ago, which have returned."""
        since = self.clock() - _DOUBTED_S
        return frozenset(node for node, at in self._lost_at.items() if at > since)

    def taken_for_alive(self) -> frozenset[str]:
        """Return those of them on which the cluster still places agents."""
        lost = self.recent()
        return lost.intersection(self.living()) if lost else lost

    def addresses(self) -> list[str]:
        """Return the addresses of those on which the cluster still places agents."""
        return [self._hosts[node] for node in sorted(self.taken_for_alive())]


class AvoidedNodes:
    """The nodes that get no agents of one run though they live, each until some time."""

    def __init__(self, living: Callable[[], Mapping[str, object]]) -> None:
        """
        Args:
            living: returns the nodes that the cluster takes for alive.
        """
        self._find_living = living
        self._until: dict[str, float] = {}
        self.rejected: dict[str, str] = {}
        """Those that the run can't use, as long as it lives → the reason."""

    @property
    def nodes(self) -> frozenset[str]:
        """All of them."""
        return frozenset(self._until)

    @property
    def next_at(self) -> float:
        """The time at which to call `drop_old`; infinite if no node can be used again."""
        return min(self._until.values(), default=math.inf)

    def living(self) -> frozenset[str]:
        """Return those that the cluster takes for alive."""
        return self.nodes.intersection(self._find_living() if self._until else ())

    def reject(self, node: str, reason: str) -> None:
        """Note that the run can't use a node."""
        self.rejected[node] = reason
        self.add(node)

    def add(self, node: str) -> None:
        """Avoid a node until the next attempt is placed."""
        self._until[node] = math.inf

    def change_to(self, until: Mapping[str, float]) -> None:
        """Avoid these, and those that the run can't use; the others no longer."""
        self._until = {**until, **dict.fromkeys(self.rejected, math.inf)}

    def drop_old(self, now: float) -> bool:
        """Drop those that can be used again by now; return whether there are any."""
        before = len(self._until)
        self._until = {node: until for node, until in self._until.items() if now < until}
        return len(self._until) < before

    def drop_all(self) -> bool:
        """Drop all that the run can use; return whether there are any."""
        before = len(self._until)
        self.change_to({})
        return len(self._until) < before


class RunBundles:
    """The bundles of one run; none if it is elastic."""

    def __init__(self, policy: PlacementPolicy, bundles: Bundles) -> None:
        self._policy = policy
        self._reserved = bundles
        self._nodes: dict[int, str] = {}
        """The node of each bundle that has had an agent since it has moved."""

        self._moved: dict[int, str] = {}
        """Bundles that have moved for this attempt → the nodes that they have left."""

    @property
    def are_moving(self) -> bool:
        """Whether bundles have moved for the attempt that is being placed."""
        return bool(self._moved)

    def reserve(self) -> None:
        """Reserve them."""
        scaling = self._policy.scaling
        if not scaling.is_elastic:
            self._reserved.reserve(scaling.max_workers, scaling.placement_strategy)

    def arrived(self, bundle: int, node: str) -> None:
        """Note that the agent of a bundle has arrived on a node."""
        self._nodes[bundle] = node

    def on(self, nodes: Collection[str]) -> frozenset[int]:
        """Return the bundles on these nodes."""
        return frozenset(bundle for bundle, node in self._nodes.items() if node in nodes)

    def free(
        self,
        taken: Collection[int | None],
        *,
        avoided: Collection[str],
        lost: Collection[str],
    ) -> list[int]:
        """Return the bundles without an agent that aren't on nodes to avoid.

        Those that have moved, and those on a lost node, come last: they may never get an agent.
        """
        found = self._policy.free_bundles(taken, self._nodes, avoided)
        return sorted(found, key=lambda each: each in self._moved or self._nodes.get(each) in lost)

    def move(
        self,
        taken: Collection[int | None],
        *,
        lost: frozenset[str],
        avoided: frozenset[str],
        may_return: Collection[str],
        ranked_on: Iterable[str],
        free: Nodes,
    ) -> Collection[int]:
        """Move bundles from nodes that can't be used, rather than wait for Ray; return them.

        Args:
            lost: lost nodes that Ray takes for alive.
            avoided: other living nodes to avoid.
            may_return: those of the lost nodes that are used again once they answer.
            free: free resources of all nodes that aren't lost.
        """
        moved = self._policy.bundles_to_move(
            taken, self._nodes, lost=lost, avoided=avoided, free=free
        )
        if not moved:
            return moved
        others = {node for bundle, node in self._nodes.items() if bundle not in moved}
        avoid = self._policy.nodes_for_moved(
            len(moved), unusable=lost | avoided, ranked_on={*ranked_on, *others}, free=free
        )
        self._reserved.move(moved, self._policy.scaling.placement_strategy, avoid)
        for bundle in moved:
            self._moved[bundle] = self._nodes.pop(bundle)
        if (lost - {*may_return}).issuperset(self._moved.values()):
            # If all have moved, nothing can return to the dead nodes.
            self._reserved.free_unused()
        return moved

    def move_back(self, living: Mapping[str, object] | None = None) -> frozenset[int]:
        """Undo moves for which no room was found; return the bundles, for which to ask again.

        Args:
            living: living nodes. Bundles of others are left to Ray, which moves them by now: both
                groups would wait for the same room, and the wrong one might get it. None for all
                bundles.
        """
        return self._move_back(
            [bundle for bundle, node in self._moved.items() if living is None or node not in living]
        )

    def returned(self, node: str) -> frozenset[int]:
        """Undo the moves from a node that can be used again; return the bundles for which to ask.

        Among them are those that are still waited for elsewhere: what is back may serve instead.
        """
        moved = frozenset(self._moved)
        back = self._move_back([bundle for bundle, its in self._moved.items() if its == node])
        return moved if back else back

    def _move_back(self, left: Collection[int]) -> frozenset[int]:
        back = self._reserved.move_back(left) if left else frozenset[int]()
        for bundle in left:
            del self._moved[bundle]
        return back

    def settle(self) -> None:
        """End the moves: all agents that an attempt needs have arrived."""
        self._moved.clear()
        self._reserved.free_unused()
