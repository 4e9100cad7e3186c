"""The bundles of a run of a fixed size: which nodes they are on, and which move to others."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Protocol

from polytrain.policy.placement import Nodes, PlacementPolicy


class BundleLauncher(Protocol):
    """Reserves room for agents in bundles."""

    def reserve(self, bundles: int, strategy: str) -> None:
        """Reserve room for this number of agents, all or nothing."""

    def move(self, bundles: Collection[int], strategy: str, avoid: frozenset[str]) -> None:
        """Reserve other room for bundles without agents, all or nothing, not on these nodes."""

    def move_back(self, bundles: Collection[int]) -> frozenset[int]:
        """Undo the move of those of these bundles that aren't placed yet.

        Returns:
            the bundles for which to request agents anew: these, and others that moved with them.
        """

    def free_unused(self) -> None:
        """Free the room that no bundle needs after a move."""


class RunBundles:
    """The bundles of one run; none if it is elastic."""

    def __init__(self, policy: PlacementPolicy, launcher: BundleLauncher) -> None:
        self._policy = policy
        self._launcher = launcher
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
            self._launcher.reserve(scaling.max_workers, scaling.placement_strategy)

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
            taken: bundles with an agent.
            lost: lost nodes that Ray takes for alive.
            avoided: other living nodes to avoid.
            may_return: those of the lost nodes that are used again once they answer.
            ranked_on: the nodes of agents.
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
        self._launcher.move(moved, self._policy.scaling.placement_strategy, avoid)
        for bundle in moved:
            self._moved[bundle] = self._nodes.pop(bundle)
        if (lost - {*may_return}).issuperset(self._moved.values()):
            # If all have moved, nothing can return to the dead nodes.
            self._launcher.free_unused()
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
        back = self._launcher.move_back(left) if left else frozenset[int]()
        for bundle in left:
            del self._moved[bundle]
        return back

    def settle(self) -> None:
        """End the moves: all agents that an attempt needs have arrived."""
        self._moved.clear()
        self._launcher.free_unused()
