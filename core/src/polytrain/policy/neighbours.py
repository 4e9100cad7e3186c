"""Decides on which host a rank's copies lie besides its own, and which copies are sent. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field


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
