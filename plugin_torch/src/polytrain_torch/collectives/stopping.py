"""A stop on one rank stops all ranks: the others would wait for it in their next step."""

from __future__ import annotations

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
    if isinstance(group, NodeGroup):
        # It is asked in each step: a sum would take several times as long.
        return group.any_rank(condition)
    holds = torch.full((1,), float(condition), device=device)
    dist.all_reduce(holds, group=group)
    return bool(holds.item())


def any_rank_stops(stops: bool) -> bool:
    """Whether all ranks stop here, since one does. All ranks call this together.

    On GPUs each rank decides for itself: reading what others have decided would wait for all of
    the GPU's work, in every step.
    """
    return any_rank(stops) if current_device().type == "cpu" else stops
