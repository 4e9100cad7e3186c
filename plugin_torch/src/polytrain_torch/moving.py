"""Moves batches to a device, and keeps their structure."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from copy import copy
from functools import partial
from typing import Any

import torch


def moved(batch: Any, device: torch.device, *, non_blocking: bool = True) -> Any:
    """Return a batch with all tensors in its dicts, lists and tuples on a device.

    `non_blocking` lets copies from pinned memory run while the device computes.
    """
    move = partial(moved, device=device, non_blocking=non_blocking)
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=non_blocking)
    if hasattr(batch, "to"):  # for example Transformers' BatchEncoding, or a graph
        return batch.to(device)
    if isinstance(batch, Mapping):
        return _of_same_type(batch, {key: move(value) for key, value in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(move(value) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(move(value) for value in batch)
    return batch


def _of_same_type(batch: Mapping[Any, Any], values: dict[Any, Any]) -> Mapping[Any, Any]:
    """Return a mapping of the same type with other values."""
    if type(batch) is dict:
        return values
    if isinstance(batch, MutableMapping):
        # Its constructor may take other arguments, as a defaultdict's does.
        same = copy(batch)
        same.update(values)
        return same
    made: Any = type(batch)
    mapping: Mapping[Any, Any] = made(values)
    return mapping
