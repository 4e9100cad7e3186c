"""Has torch compute the same bits each time: its algorithms, and where inputs lie in memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from polytrain_torch.private import tree_map
from polytrain_torch.survivors.gpu_copies import is_dense

ALIGNED = 64
"""Bytes to which torch aligns a tensor's memory."""

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@contextmanager
def deterministic() -> Iterator[None]:
    """Use deterministic algorithms in a block of code, and torch's settings as before after it."""
    # An inline run is in the user's process.
    was_on = torch.are_deterministic_algorithms_enabled()
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    tried = torch.backends.cudnn.benchmark
    workspace = os.environ.get(_WORKSPACE)
    # cuBLAS is deterministic only with a workspace of fixed size.
    os.environ.setdefault(_WORKSPACE, ":4096:8")
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True)
    # It takes time, and changes only what reads memory that nobody has written.
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_on, warn_only=only_warned)
        torch.utils.deterministic.fill_uninitialized_memory = filled
        torch.backends.cudnn.benchmark = tried
        if workspace is None:
            os.environ.pop(_WORKSPACE, None)


def why_not_deterministic() -> str | None:
    """Return what the training function has set against `deterministic`, as a clause."""
    if (
        not torch.are_deterministic_algorithms_enabled()
        or torch.is_deterministic_algorithms_warn_only_enabled()
    ):
        return "the training function has turned deterministic algorithms off"
    if torch.backends.cudnn.benchmark and torch.cuda.is_initialized():
        return (
            "the training function has set torch.backends.cudnn.benchmark, which chooses "
            "algorithms by their times"
        )
    return None


def aligned(batch: Any) -> Any:
    """Return a batch whose tensors on the CPU lie in memory as torch's own: others are copied.

    The last bits of a matrix product depend on the addresses and strides of its inputs. NumPy's
    arrays and parts of larger tensors may begin anywhere, and have gaps.
    """
    return tree_map(_aligned, batch)


def _aligned(value: Any) -> Any:
    if (
        not isinstance(value, torch.Tensor)
        or value.layout is not torch.strided
        or value.device.type != "cpu"
        or value.requires_grad
        or (value.data_ptr() % ALIGNED == 0 and is_dense(value))
    ):
        return value
    return value.clone()
