"""An all-gather of values that can be pickled."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def gathered(value: Any) -> list[Any]:
    """Return the values of all ranks, by rank. All ranks call this."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
