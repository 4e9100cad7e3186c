"""Batches on their way to a device, in the structure that they come in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def moved(batch: Any, device: torch.device) -> Any:
    """The batch with all tensors on a device."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if hasattr(batch, "to"):  # such as Transformers' BatchEncoding, or a graph
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {key: moved(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(moved(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(moved(value, device) for value in batch)
    return batch
