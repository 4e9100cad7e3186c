"""`barrier`, and `join` for ranks that run out of data before others."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from polytrain_torch.horovod.basics import context
from polytrain_torch.horovod.call_log import completed, count, log_call, next_call
from polytrain_torch.horovod.gradients import take_part
from polytrain_torch.horovod.reductions import (
    ReduceOp,
    on_group_device,
    refuse_process_set,
    torch_op,
)


def barrier(process_set: None = None) -> None:
    """Wait until all ranks make this call."""
    refuse_process_set(process_set)
    context()
    number = log_call("barrier")
    dist.barrier()
    completed(number)


def join(device: int = -1) -> int:
    """Say that this rank has no more data, and wait until all ranks say so.

    Until then this rank takes part in the others' `allreduce` and in the steps of their
    `DistributedOptimizer`, with zeros. Averages are still divided by the number of all ranks.

    Args:
        device: no effect; zeros are on the process group's device.

    Returns:
        The rank that joined last.

    Raises:
        RuntimeError: another rank makes a call in which a joined rank can't take part.
    """
    place = context()
    if place.get_world_size() == 1:
        return 0
    # An earlier join has ended when all ranks had joined.
    if count("joined") % place.get_world_size() == 0:
        log_call("join", place.get_world_rank())
        return place.get_world_rank()
    while True:
        function, *others = next_call()
        if function == "join":
            return int(others[0])
        _take_part(function, others)


def _take_part(function: str, others: list[Any]) -> None:
    """Take part in another rank's call with zeros."""
    if function == "gradients":
        take_part(others[0])
        return
    if function != "allreduce":
        raise RuntimeError(
            f"another rank calls hvd.{function}, and rank {dist.get_rank()} has joined: it "
            "only takes part in hvd.allreduce and in steps of a DistributedOptimizer. Make this "
            "call on all ranks before hvd.join(), or after it."
        )
    op, *tensors = others
    works = [
        dist.all_reduce(_zeros(each), torch_op(ReduceOp(op)), async_op=True) for each in tensors
    ]
    for work in works:
        work.wait()


def _zeros(described: str) -> torch.Tensor:
    """Return zeros of a logged dtype and shape, such as `torch.float32 [2, 3]`."""
    dtype, _, shape = described.partition(" ")
    sizes = [int(size) for size in shape.strip("[]").split(",") if size.strip()]
    return on_group_device(torch.zeros(sizes, dtype=getattr(torch, dtype.removeprefix("torch."))))
