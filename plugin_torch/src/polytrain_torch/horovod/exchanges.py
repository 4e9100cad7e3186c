"""`broadcast`, `allgather`, `alltoall` and `reducescatter`.

As in Horovod, the gradient of `broadcast` and `allgather` is the average over ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from polytrain_torch.horovod.basics import context
from polytrain_torch.horovod.call_log import log_call
from polytrain_torch.horovod.handles import Pending, handle_of, synchronize
from polytrain_torch.horovod.reductions import (
    Average,
    Compression,
    Compressor,
    Sum,
    allreduce,
    on_group_device,
    refuse_process_set,
    started,
)


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: None = None
) -> int:
    """Start a `broadcast` in place; return a handle for `synchronize`.

    Raises:
        ValueError: there is no rank `root_rank`.
    """
    refuse_process_set(process_set)
    size = context().get_world_size()
    if not 0 <= root_rank < size:
        raise ValueError(f"root_rank={root_rank!r}: there are the ranks 0 to {size - 1}")
    log_call("broadcast", root_rank, str(tensor.dtype), [*tensor.shape])
    sent = on_group_device(tensor.detach()).contiguous()
    work = dist.broadcast(sent, root_rank, async_op=True)

    def finish() -> torch.Tensor:
        if sent.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(sent)
        return tensor

    # The root may be done before others have begun, so this doesn't complete the logged call.
    return handle_of(Pending(works=[work], finish=finish))


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: None = None
) -> int:
    """Start a `broadcast`; return a handle for `synchronize`."""
    return broadcast_async_(tensor.detach().clone(), root_rank, name, process_set)


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: None = None
) -> torch.Tensor:
    """Replace the tensor in place by that of the rank `root_rank`."""
    sent: torch.Tensor = synchronize(broadcast_async_(tensor, root_rank, name, process_set))
    return sent


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root_rank: int) -> Any:
        ctx.root_rank = root_rank
        return synchronize(broadcast_async(tensor, root_rank))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        gradient = allreduce(gradients[0])
        is_root = context().get_world_rank() == ctx.root_rank
        return gradient if is_root else torch.zeros_like(gradient), None


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: None = None
) -> torch.Tensor:
    """Return the tensor of the rank `root_rank` as a new tensor. It is differentiable."""
    refuse_process_set(process_set)
    sent: torch.Tensor = _Broadcast.apply(tensor, root_rank)
    return sent


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: None = None) -> int:
    """Start an `allgather`; return a handle for `synchronize`."""
    refuse_process_set(process_set)
    return handle_of(_gathering(tensor))


def _gathering(tensor: torch.Tensor) -> Pending:
    number, given = _logged("allgather", tensor)
    rows = _exchanged_sizes([given.shape[0]])
    # Ranks with fewer rows send padding: all must send the same number.
    padded = given.new_zeros((max(row for [row] in rows), *given.shape[1:]))
    padded[: given.shape[0]] = given
    parts = [torch.empty_like(padded) for _ in rows]
    work = dist.all_gather(parts, padded, async_op=True)

    def finish() -> torch.Tensor:
        pairs = zip(parts, rows, strict=True)
        return torch.cat([part[:row] for part, [row] in pairs]).to(tensor.device)

    return Pending(works=[work], finish=finish, number=number)


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> Any:
        gathered = synchronize(allgather_async(tensor))
        ctx.rows = tensor.shape[0]
        return gathered

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        gradient = allreduce(gradients[0])
        log_call("allgather", "rows")
        rows = _exchanged_sizes([ctx.rows])
        before = sum(row for [row] in rows[: context().get_world_rank()])
        return gradient[before : before + ctx.rows]


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: None = None
) -> torch.Tensor:
    """Return the tensors of all ranks, concatenated along the first dimension in rank order.

    It is differentiable.

    Args:
        tensor: a tensor of at least one dimension; only the first may differ between ranks.
        name: no effect.
        process_set: refused; leave it out.
    """
    refuse_process_set(process_set)
    gathered: torch.Tensor = _Allgather.apply(tensor)
    return gathered


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: None = None
) -> list[torch.Tensor]:
    """Gather several tensors, as `allgather` does."""
    return [allgather(tensor, name, process_set) for tensor in tensors]


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: None = None
) -> int:
    """Start an `allgather` of several tensors; return a handle for `synchronize`."""
    refuse_process_set(process_set)
    parts = [_gathering(tensor) for tensor in tensors]
    works = [work for part in parts for work in part.works]
    return handle_of(Pending(works=works, finish=lambda: [part.wait() for part in parts]))


def alltoall_async(
    tensor: torch.Tensor, splits: Any = None, name: str | None = None, process_set: None = None
) -> int:
    """Start an `alltoall`; return a handle. `synchronize` returns (tensor, received splits)."""
    refuse_process_set(process_set)
    sent = _splits(tensor, splits)
    number, given = _logged("alltoall", tensor)
    received = [row[context().get_world_rank()] for row in _exchanged_sizes(sent)]
    output = given.new_empty((sum(received), *given.shape[1:]))
    work = dist.all_to_all_single(output, given, received, sent, async_op=True)

    def finish() -> tuple[torch.Tensor, torch.Tensor]:
        return output.to(tensor.device), torch.tensor(received, dtype=torch.int32)

    return handle_of(Pending(works=[work], finish=finish, number=number))


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, splits: Any) -> Any:
        output, received = synchronize(alltoall_async(tensor, splits))
        ctx.received = received
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        gradient, _ = _Alltoall.apply(gradients[0], ctx.received)
        return gradient, None


def alltoall(
    tensor: torch.Tensor, splits: Any = None, name: str | None = None, process_set: None = None
) -> Any:
    """Send each rank a part of the first dimension, and return the parts received, in rank order.

    It is differentiable.

    Args:
        tensor: the tensor to divide; ranks' tensors may differ in the first dimension only.
        splits: number of rows for each rank, a tensor or list; equal by default.
        name: no effect.
        process_set: refused; leave it out.

    Returns:
        A tensor; with `splits` also an int32 tensor of the number of rows from each rank.

    Raises:
        ValueError: the rows can't be divided like that.
    """
    refuse_process_set(process_set)
    output, received = _Alltoall.apply(tensor, splits)
    return output if splits is None else (output, received)


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: Any = Average,
    process_set: None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start a `reducescatter`; return a handle for `synchronize`."""
    refuse_process_set(process_set)
    if tensor.dim() == 0:
        raise ValueError("tensor: it has no dimension to divide among the ranks")
    pending = started("reducescatter", [tensor], op, prescale_factor, postscale_factor)
    ranks, rank = context().get_world_size(), context().get_world_rank()

    def finish() -> torch.Tensor:
        [whole] = pending.finish()
        part: torch.Tensor = whole.tensor_split(ranks)[rank]
        return part.clone()

    return handle_of(Pending(works=pending.works, finish=finish, number=pending.number))


class _Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, op: Any, prescale: float, postscale: float) -> Any:
        ctx.factor = prescale * postscale
        if op is Sum:
            ctx.factor *= context().get_world_size()
        return synchronize(reducescatter_async(tensor, None, op, None, prescale, postscale))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return allgather(gradients[0] * ctx.factor), None, None, None


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Any = Average,
    process_set: None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Return this rank's part of `allreduce`'s result, along the first dimension.

    If it can't be divided evenly, the first ranks get one more row. It is differentiable.
    """
    refuse_process_set(process_set)
    compressed, ctx = compression.compress(tensor)
    reduced = _Reducescatter.apply(compressed, op, prescale_factor, postscale_factor)
    return compression.decompress(reduced, ctx)


def _logged(call: str, tensor: torch.Tensor) -> tuple[int, torch.Tensor]:
    """Log a call whose first dimension may differ by rank; return its number and the input."""
    context()
    if tensor.dim() == 0:
        raise ValueError(f"tensor: hvd.{call} needs a first dimension, and it is a scalar")
    number = log_call(call, str(tensor.dtype), [*tensor.shape[1:]])
    return number, on_group_device(tensor.detach()).contiguous()


def _exchanged_sizes(mine: Sequence[int]) -> list[list[int]]:
    """Return all ranks' integers, by rank. All ranks pass the same number of them."""
    sent = on_group_device(torch.tensor(mine, dtype=torch.int64))
    all_sizes = [torch.empty_like(sent) for _ in range(dist.get_world_size())]
    dist.all_gather(all_sizes, sent)
    return [sizes.tolist() for sizes in all_sizes]


def _splits(tensor: torch.Tensor, splits: Any) -> list[int]:
    ranks, rows = context().get_world_size(), tensor.shape[0] if tensor.dim() else 0
    if splits is None:
        if rows % ranks:
            raise ValueError(
                f"tensor: its {rows} rows can't be divided evenly among {ranks} ranks. Pass splits"
            )
        return [rows // ranks] * ranks
    given = [int(split) for split in splits]
    if len(given) != ranks or sum(given) != rows or min(given) < 0:
        raise ValueError(
            f"splits={given}: give {ranks} numbers, one for each rank, that add up to {rows}"
        )
    return given
