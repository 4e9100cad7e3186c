"""What a training function may know of nodes that are about to be taken away."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptionInfo:
    """Nodes of this run that are about to be taken away. Ray Train's class has the same fields."""

    deadline_ms: int | None
    """When the first of them goes, in milliseconds since the epoch; None if nobody has said."""

    preempted_node_to_ranks: Mapping[str, list[int]]
    """Ray's id of each of these nodes → the ranks there."""

    @property
    def preempted_node_ids(self) -> list[str]:
        """The ids of these nodes, sorted."""
        return sorted(self.preempted_node_to_ranks)

    @property
    def preempted_ranks(self) -> list[int]:
        """The ranks on these nodes, sorted."""
        return sorted(rank for ranks in self.preempted_node_to_ranks.values() for rank in ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeavingNode:
    """A node that is announced to be taken away."""

    address: str
    deadline_ms: int | None = None
    """When it goes, in milliseconds since the epoch; None if nobody has said."""


def earliest(deadlines_ms: list[int | None]) -> int | None:
    """Return the earliest of the deadlines that are known."""
    return min((each for each in deadlines_ms if each is not None), default=None)
