"""Decides when a training's state is copied, where copies lie, and which ones are sent. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

_SHARE = 0.03
"""Maximum share of the time that "auto" spends on copies."""

_AVERAGED = 8
"""Number of copies, about, over which a cost is averaged that other work on the machine blurs."""


@dataclass(slots=True, kw_only=True)
class CopyPace:
    """When the next copy is due. Times are in seconds, of one clock."""

    every: Literal["auto"] | int
    """Number of steps from copy to copy; "auto" goes by the time that copies take."""

    is_shared: bool = False
    """Whether several ranks copy at the same steps. Their clocks differ, so "auto" goes by steps:
    after 1, 2, 4, 8, … more of them, until the ranks agree on a number."""

    wanted: int = 0
    """The number of steps from copy to copy that keeps this rank's share; 0 if not known yet."""

    _steps: int = 0
    """Number of steps since the last copy."""

    _due_at: float = 0.0
    _interval: int = 1
    """Number of steps until the next copy of several ranks with "auto"."""

    _is_agreed: bool = False
    _ended: float | None = None
    """When the last copy ended; None before there was one."""

    _after: float = 0.0
    """Seconds from there to the end of the next step: other ranks may still have copied."""

    _step: float = 0.0
    """Seconds of a step that doesn't follow a copy; 0 if not known yet."""

    _excess: float = 0.0
    """By how many seconds a step that follows a copy is longer, on average."""

    _timed: int = 0
    """Number of steps in that average."""

    def is_due(self, now: float) -> bool:
        """Note a step; return whether the state after it is to be copied."""
        self._steps += 1
        if self._steps == 1 and self._ended is not None:
            self._after = now - self._ended
        if self.every != "auto":
            return self._steps >= self.every
        if self.is_shared:
            return self._steps >= self._interval
        is_known = self._ended is None or self._step > 0 or self._steps > 1
        return is_known and now >= self._due_at

    def copied(self, began: float, ended: float) -> None:
        """Note that a copy was made, or tried, between these times.

        If steps that follow a copy are longer than others, that is a cost of copies too.
        """
        cost = ended - began
        if self._ended is not None:
            if self._steps > 1:
                self._step = (began - self._ended - self._after) / (self._steps - 1)
            step = self._step or self._after
            self._timed = min(self._timed + 1, _AVERAGED)
            self._excess += (self._after - step - self._excess) / self._timed
            cost += max(0.0, self._excess)
            self.wanted = max(1, math.ceil(_rest(cost) / step)) if step > 0 else self._steps
        self._steps = 0
        self._due_at, self._ended = ended + _rest(cost), ended
        if not self._is_agreed:
            self._interval *= 2

    def agree(self, wanted: Sequence[int]) -> None:
        """Copy from now on as seldom as the slowest rank wants, once one knows.

        Args:
            wanted: `wanted` of all ranks, of which each calls this.
        """
        if any(wanted):
            self._is_agreed, self._interval = True, max(wanted)


def _rest(cost: float) -> float:
    """Return how many seconds have to be spent otherwise for a copy's."""
    return cost * (1 / _SHARE - 1)


def neighbours(nodes: Sequence[str]) -> list[int | None]:
    """Return for each rank the one whose agent keeps its copies: on the next host of a ring.

    Args:
        nodes: the node of each rank.

    Returns:
        Ranks; None for all if there is one host.
    """
    by_node: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        by_node.setdefault(node, []).append(rank)
    ring = list(by_node.values())
    if len(ring) == 1:
        return [None] * len(nodes)
    found: list[int | None] = [None] * len(nodes)
    for at, ranks in enumerate(ring):
        others = ring[(at + 1) % len(ring)]
        for local, rank in enumerate(ranks):
            found[rank] = others[local % len(others)]
    return found


def to_keep(numbers: Collection[int], common: int | None) -> int | None:
    """Return which of a rank's sent copies stays while the next one is sent.

    Args:
        numbers: the copies that are there.
        common: the newest one that all ranks had sent when they were asked for the next.

    Returns:
        None if there are none.
    """
    return common if common in numbers else max(numbers, default=None)


@dataclass(slots=True)
class Sends:
    """Which copies the ranks of an attempt send. All send the same one, and then the next.

    Copies are numbered by steps. A rank sends the first one from a number on that it has or makes,
    so the number has to be one that no rank has passed when it hears of it.
    """

    world_size: int
    common: int | None = None
    """The newest copy that all ranks have sent. It stays until there is a newer one."""

    _sent: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Rank → the copy that it has sent in this round, and its newest one."""

    _ahead: int = 0
    """Steps that ranks may take until they hear of the next number."""

    def sent(self, rank: int, number: int, newest: int) -> int | None:
        """Note that a neighbour has a copy; return from which number on all send the next one.

        Args:
            rank: whose copy it is.
            number: the copy's number.
            newest: the number of the rank's newest copy.

        Returns:
            None as long as other ranks send theirs.
        """
        self._sent[rank] = number, newest
        if len(self._sent) < self.world_size:
            return None
        if len({number for number, _ in self._sent.values()}) == 1:
            self.common = number
        else:
            # Some had passed the last number.
            self._ahead = max(1, 2 * self._ahead)
        following = max(newest for _, newest in self._sent.values()) + 1 + self._ahead
        self._sent.clear()
        return following
