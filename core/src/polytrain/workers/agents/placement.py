"""Assigns ranks to workers, node by node. Pure."""

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
    """The reason that the run can't use the node; None if it can."""


def rank_order(places: Sequence[NodeAddress], first_node: str) -> list[int]:
    """Return the order in which workers get their ranks: workers of one node are consecutive.

    Args:
        places: the node of each worker.
        first_node: the node whose workers come first, if it has any; usually the driver's.

    Returns:
        Indices into `places`; the worker at position r becomes rank r.
    """
    nodes = list(dict.fromkeys(place.node_id for place in places))
    nodes.sort(key=lambda node: node != first_node)
    return sorted(range(len(places)), key=lambda index: nodes.index(places[index].node_id))


def members(places: Sequence[NodeAddress], *, cpus: int, gpus: int) -> tuple[Member, ...]:
    """Return the members of a world, in rank order.

    Args:
        places: the node of each rank, in rank order.
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
