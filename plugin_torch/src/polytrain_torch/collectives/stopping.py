"""Stops all ranks if one rank stops: the others would wait for it in their next step."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from polytrain_torch.collectives.node_group import NodeGroup, gradient_group
from polytrain_torch.devices import current_device


def any_rank(condition: bool) -> bool:
    """Whether a condition holds on any rank. All ranks call this together."""
    if dist.get_world_size() == 1:
        return condition
    device = current_device()
    group = gradient_group(device)
    if isinstance(group, NodeGroup) and group.shares_memory:
        # This runs in every step, and an all-reduce would take several times as long.
        return group.any_rank(condition)
    holds = torch.full((1,), float(condition), device=device)
    dist.all_reduce(holds)
    return bool(holds.item())


def agreed(vote: Callable[[bool], bool], *stops: bool) -> tuple[bool, ...]:
    """Return which of several stops there are, by votes. Nearly always one vote is enough.

    Args:
        vote: `any_rank` or `any_rank_stops`.
        stops: which of them there are on this rank.
    """
    return tuple(map(vote, stops)) if vote(any(stops)) else stops


def any_rank_stops(stops: bool) -> bool:
    """Whether any rank stops here, so that all do. All ranks call this together.

    On GPUs each rank decides for itself: to read the others' decisions, it would wait for all of
    the GPU's work in every step.
    """
    return any_rank(stops) if current_device().type == "cpu" else stops
