"""Notices of a preemption, and of a rollback to an earlier checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Skipped = tuple[int, int, int]
"""An epoch, the first position that is left out in it, and the position after the last one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollback:
    """The end of an attempt that diverged. The run goes back to a state before its first bad step.

    The first bad step is after `good_step`, and is `step` at the latest.
    """

    number: int = 0
    """Number among the run's rollbacks, from 1."""

    attempt: int
    rank: int
    """The rank whose report showed it."""

    step: int
    """The step of the bad report."""

    good_step: int
    """The step of that rank's last good report before it, or of the checkpoint that the attempt
    started from. Checkpoints of this attempt that were made after it don't count."""

    reason: str
    """What was wrong with the report."""

    skipped: Mapping[str, tuple[Skipped, ...]] = field(default_factory=dict)
    """Data set → what the run leaves out from now on: epoch, first position, position after the
    last one. Empty with `on_rollback`."""

    def __str__(self) -> str:
        return f"step {self.step}: {self.reason}"

    @property
    def without(self) -> str:
        """What is left out, for people; empty if that is nothing."""
        return "; ".join(
            f"positions {first} to {stop - 1} of epoch {epoch} of {name!r}"
            for name, ranges in self.skipped.items()
            for epoch, first, stop in ranges
        )


def as_skipped(read: Mapping[str, Sequence[Sequence[int]]]) -> Mapping[str, tuple[Skipped, ...]]:
    """Return what is left out, by data set, of lists as messages and lines hold them."""
    return {
        name: tuple((epoch, first, stop) for epoch, first, stop in ranges)
        for name, ranges in read.items()
    }


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


def sooner(
    draining: Mapping[str, int | None], known: Mapping[str, int | None]
) -> dict[str, int | None]:
    """Return the deadlines of nodes that aren't known to go, or go sooner than is known."""
    return {
        node: deadline_ms
        for node, deadline_ms in draining.items()
        if node not in known or earliest([deadline_ms, known[node]]) != known[node]
    }


def earliest(deadlines_ms: list[int | None]) -> int | None:
    """Return the earliest of the deadlines that are known."""
    return min((each for each in deadlines_ms if each is not None), default=None)
