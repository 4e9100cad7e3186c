"""Collective operations on whatever can be pickled."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def gathered(value: Any) -> list[Any]:
    """Everybody's value, by rank. All ranks call this."""
    everybodys: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybodys, value)
    return everybodys
