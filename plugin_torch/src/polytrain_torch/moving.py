"""Moves batches to a device, and keeps their structure."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from copy import copy
from typing import Any

import torch


def moved(batch: Any, device: torch.device) -> Any:
    """The batch with all tensors on a device."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if hasattr(batch, "to"):  # for example Transformers' BatchEncoding, or a graph
        return batch.to(device)
    if isinstance(batch, Mapping):
        return _of_same_type(batch, {key: moved(value, device) for key, value in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(moved(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(moved(value, device) for value in batch)
    return batch


def _of_same_type(batch: Mapping[Any, Any], values: dict[Any, Any]) -> Mapping[Any, Any]:
    """The mapping with other values."""
    if type(batch) is dict:
        return values
    if isinstance(batch, MutableMapping):
        # Its constructor may take something else, as a defaultdict's does.
        same = copy(batch)
        same.update(values)
        return same
    made: Any = type(batch)
    mapping: Mapping[Any, Any] = made(values)
    return mapping
