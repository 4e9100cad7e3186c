"""Which worker gets which rank: ranks are numbered node by node. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from polytrain_plugins import Member


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAddress:
    """The node of one worker."""

    node_id: str
    host: str
    unusable: str | None = None
    """Why no worker of the run can run there; None if one can."""


def rank_order(places: Sequence[NodeAddress], first_node: str) -> list[int]:
    """The order in which workers get their ranks: those of one node next to each other.

    Args:
        places: where each worker is.
        first_node: the node whose workers come first, if it has any; usually the driver's.

    Returns:
        Indices into `places`; the worker at position r becomes rank r.
    """
    nodes = list(dict.fromkeys(place.node_id for place in places))
    nodes.sort(key=lambda node: node != first_node)
    return sorted(range(len(places)), key=lambda index: nodes.index(places[index].node_id))


def members(places: Sequence[NodeAddress], *, cpus: int, gpus: int) -> tuple[Member, ...]:
    """The members of a world, in rank order.

    Args:
        places: where each rank is, in rank order.
        cpus: CPU threads of each rank.
        gpus: GPUs of each rank.
    """
    nodes = list(dict.fromkeys(place.node_id for place in places))
    on_node = {node: [r for r, p in enumerate(places) if p.node_id == node] for node in nodes}
    return tuple(
        Member(
            rank=rank,
            world_size=len(places),
            local_rank=on_node[place.node_id].index(rank),
            local_world_size=len(on_node[place.node_id]),
            node_rank=nodes.index(place.node_id),
            node_count=len(nodes),
            host=place.host,
            cpus=cpus,
            gpus=gpus,
        )
        for rank, place in enumerate(places)
    )
