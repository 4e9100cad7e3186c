"""Warns where ranks share a model's tensors, as in tensor parallelism, and have different rows.

Such ranks compute one output, each from its part of the weights: of different rows that is the
output of none. polytrain divides rows between all ranks. It warns and raises no error, because a
training function may send the rows of one rank to the others, and experts of a mixture have
different rows.
"""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

logger = logging.getLogger(__name__)

_seen: set[str] = set()
"""What this process has seen: "rows", "tensors", both if it has warned."""


def rows_are_divided() -> None:
    """Tell that each rank gets rows of its own."""
    _see("rows")


def see_model(model: torch.nn.Module) -> None:
    """Look at a model that is trained."""
    if "tensors" not in _seen and _is_shared(model):
        _see("tensors")


def _see(what: str) -> None:
    if what in _seen:
        return
    _seen.add(what)
    if len(_seen) > 1 and dist.get_rank() == 0:
        logger.warning(
            "Ranks share tensors of the model, as after parallelize_module, but each has other "
            "rows, so what they compute together belongs to no row. Give them the same rows: "
            'DistributedSampler(data, mesh["data"].size(), mesh["data"].get_local_rank()) in a '
            "loader for prepare_data_loader, where mesh["
            '"data"] is the dimension over which rows are divided.'
        )


def _is_shared(model: torch.nn.Module) -> bool:
    # FSDP cuts tensors too, in one dimension of the mesh, but gathers them before it computes.
    gathered = any(isinstance(each, FSDPModule) for each in model.modules())
    for parameter in model.parameters():
        if not isinstance(parameter, DTensor):
            continue
        sizes = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
        cut = [size for placement, size in sizes if not placement.is_replicate()]
        if len(cut) > gathered and cut[-1] > 1:
            return True
    return False
