"""Decides which connections between nodes are tried, and describes those that fail. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALL_UP_TO = 16
"""Nodes up to which every connection is tried."""


def targets(count: int) -> list[list[int]]:
    """Return, for each node, the nodes that it connects to.

    Up to `ALL_UP_TO` nodes these are all others. Of more nodes, each connects to those 1, 2, 4, …
    places after it: every node is connected to from as many others as it connects to, near and far.
    """
    if count <= ALL_UP_TO:
        return [[other for other in range(count) if other != node] for node in range(count)]
    strides = [2**power for power in range(count.bit_length()) if 2**power < count]
    return [[(node + stride) % count for stride in strides] for node in range(count)]


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedLink:
    """A connection that can't be made."""

    source: str
    """Address of the node that connects."""

    target: str
    """Address of the node that listens."""

    reason: str

    def __str__(self) -> str:
        if self.source == self.target:
            return f"{self.target} can't listen there ({self.reason})"
        return f"{self.source} can't connect to {self.target} ({self.reason})"


_SHOWN = 4
"""Failed connections that an error names."""


def described(failed: Sequence[FailedLink]) -> str:
    """Return failed connections as one line, the first few by name."""
    shown = "; ".join(map(str, failed[:_SHOWN]))
    more = len(failed) - _SHOWN
    return f"{shown}; and {more} more" if more > 0 else shown


def remedy_for(failed: Sequence[FailedLink]) -> str:
    """Return what to do about connections of which at least one failed."""
    to = ", ".join(dict.fromkeys(each.target for each in failed[:_SHOWN]))
    return (
        f"Let other nodes connect to {to} over TCP, at all ports or those of RunConfig(ports=…): "
        "its firewall or the cloud's rules decide. Or see that Ray knows each node by an address "
        "that the others reach (ray start --node-ip-address=…), or name a network for the ranks: "
        "RunConfig(network_interface=…)"
    )
