"""An all-gather and a broadcast of values that can be pickled."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def gathered(value: Any) -> list[Any]:
    """Return the values of all ranks, by rank. All ranks call this."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def from_rank_0(value: Any) -> Any:
    """Return rank 0's value. All ranks call this; what the others pass isn't used."""
    sent = [value]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(sent, src=0)
    return sent[0]
