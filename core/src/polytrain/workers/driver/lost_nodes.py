"""The nodes that a run has lost, of which the cluster may take some for alive."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from polytrain.policy.placement import NodeAddress

_DOUBTED_S = 120.0
"""Seconds for which a lost node gets no agents though the cluster takes it for alive. By default
Ray is sure within 66 s; after that it was unreachable only for a while."""


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
            place: the node.
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
