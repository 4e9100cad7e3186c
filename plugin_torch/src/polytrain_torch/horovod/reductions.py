"""Reductions over all ranks: `allreduce` and its variants, and the compression of what is sent."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from enum import Enum
from typing import Any, Protocol

import torch
import torch.distributed as dist

from polytrain_torch.devices import current_device
from polytrain_torch.horovod.basics import context
from polytrain_torch.horovod.call_log import log_call
from polytrain_torch.horovod.handles import Pending, handle_of, synchronize


class Compressor(Protocol):
    """Compresses tensors before they are sent. Users may pass their own class."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor to send, and the context for `decompress`."""
        ...

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the operation's result in the original dtype."""
        ...


class _Unchanged:
    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor


class _HalfPrecision:
    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor.half() if tensor.is_floating_point() else tensor, tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor.to(ctx)


class Compression:
    """Values for the argument `compression`."""

    none = _Unchanged
    """Send tensors as they are."""

    fp16 = _HalfPrecision
    """Send floating-point tensors as float16; they are also summed as float16."""


class ReduceOp(Enum):
    """Operations that reduce the tensors of all ranks to one."""

    AVERAGE = "Average"
    SUM = "Sum"
    ADASUM = "Adasum"
    MIN = "Min"
    MAX = "Max"
    PRODUCT = "Product"


Average = ReduceOp.AVERAGE
"""The sum divided by the number of ranks."""

Sum = ReduceOp.SUM
"""The sum."""

Adasum = ReduceOp.ADASUM
"""Refused where it is used: Adasum isn't implemented."""

Min = ReduceOp.MIN
"""The minimum of each element."""

Max = ReduceOp.MAX
"""The maximum of each element."""

Product = ReduceOp.PRODUCT
"""The product of each element."""

_TORCH = {
    # Not every process group can average.
    ReduceOp.AVERAGE: dist.ReduceOp.SUM,
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.MIN: dist.ReduceOp.MIN,
    ReduceOp.MAX: dist.ReduceOp.MAX,
    ReduceOp.PRODUCT: dist.ReduceOp.PRODUCT,
}


def torch_op(op: Any) -> Any:
    """Return torch's operation. For an average it is a sum, to be divided afterwards.

    Raises:
        NotImplementedError: `op` is Adasum.
        ValueError: `op` isn't one of Horovod's.
    """
    if op is ReduceOp.ADASUM:
        raise NotImplementedError(
            "op=hvd.Adasum: there is no Adasum here. Use hvd.Average, with a learning rate that is "
            "scaled to the number of ranks if the script expects it."
        )
    if op not in _TORCH:
        raise ValueError(f"op={op!r}: give hvd.Average, Sum, Min, Max or Product")
    return _TORCH[op]


def op_of(op: Any, average: bool | None) -> Any:
    """Return the operation that `op`, or the older argument `average`, selects.

    Raises:
        ValueError: both are given.
    """
    if average is None:
        return Average if op is None else op
    if op is not None:
        raise ValueError("average and op say the same. Give op only: hvd.Average or hvd.Sum")
    warnings.warn(
        "average is Horovod's old argument: write op=hvd.Average or op=hvd.Sum",
        DeprecationWarning,
        stacklevel=3,
    )
    return Average if average else Sum


def refuse_process_set(process_set: Any) -> None:
    """Refuse a process set: all ranks take part in every call.

    Raises:
        NotImplementedError: one is given.
    """
    if process_set is not None:
        raise NotImplementedError(
            "process_set: all ranks are one process set here. Leave it out, or use "
            "torch.distributed with a group of its own"
        )


def scale(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Multiply a tensor in place. Integers are truncated, as by Horovod."""
    if factor != 1.0:
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.mul_(factor)
        else:
            tensor.copy_((tensor.double() * factor).to(tensor.dtype))
    return tensor


def on_group_device(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor on a device of the process group: NCCL can't use the CPU."""
    if tensor.device.type == "cpu" and dist.get_backend() == "nccl":
        return tensor.to(current_device())
    return tensor


def started(
    call: str, tensors: Sequence[torch.Tensor], op: Any, prescale: float, postscale: float
) -> Pending:
    """Start to reduce tensors. The result is a list of new tensors."""
    size, reduce = context().get_world_size(), torch_op(op)
    shapes = [f"{each.dtype} {[*each.shape]}" for each in tensors]
    number = log_call(call, op.value, *shapes)
    # By default `clone` keeps the strides, which may differ between ranks.
    sent = [
        scale(on_group_device(each.detach()).clone(memory_format=torch.contiguous_format), prescale)
        for each in tensors
    ]
    works = [dist.all_reduce(each, reduce, async_op=True) for each in sent]
    factor = postscale / size if op is Average else postscale

    def finish() -> list[torch.Tensor]:
        pairs = zip(sent, tensors, strict=True)
        return [scale(each, factor).to(given.device) for each, given in pairs]

    return Pending(works=works, finish=finish, number=number)


class _Allreduce(torch.autograd.Function):
    """A differentiable reduction: its gradient is the same reduction of the gradients."""

    @staticmethod
    def forward(ctx: Any, options: tuple[Any, ...], *tensors: torch.Tensor) -> Any:
        ctx.options = options
        return tuple(started("allreduce", tensors, *options).wait())

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return (None, *_Allreduce.apply(ctx.options, *gradients))


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: None = None,
) -> torch.Tensor:
    """Return the average (or another `op`) of the tensors of all ranks as a new tensor.

    It is differentiable: the gradient is the same reduction of all ranks' gradients.

    Args:
        tensor: a tensor of the same shape and dtype on every rank.
        average: deprecated; use `op`. True for the average, False for the sum.
        name: no effect; ranks make the same calls in the same order.
        compression: a member of `Compression`, for the tensor.
        op: `Average` by default; `Sum`, `Min`, `Max` or `Product`.
        prescale_factor: factor for the tensor before the reduction.
        postscale_factor: factor for the result.
        process_set: refused; leave it out.
    """
    refuse_process_set(process_set)
    [reduced] = grouped_allreduce(
        [tensor], None, name, compression, op_of(op, average), prescale_factor, postscale_factor
    )
    return reduced


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: None = None,
) -> list[torch.Tensor]:
    """Reduce several tensors, as `allreduce` does."""
    refuse_process_set(process_set)
    options = (op_of(op, average), prescale_factor, postscale_factor)
    compressed = [compression.compress(tensor) for tensor in tensors]
    reduced = _Allreduce.apply(options, *(tensor for tensor, _ in compressed))
    pairs = zip(reduced, compressed, strict=True)
    return [compression.decompress(tensor, ctx) for tensor, (_, ctx) in pairs]


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: None = None,
) -> int:
    """Start an `allreduce`; return a handle for `synchronize`."""
    refuse_process_set(process_set)
    return _handle([tensor], op_of(op, average), prescale_factor, postscale_factor, is_one=True)


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: None = None,
) -> int:
    """Start an `allreduce` in place; return a handle for `synchronize`."""
    refuse_process_set(process_set)
    scales = (prescale_factor, postscale_factor)
    return _handle([tensor], op_of(op, average), *scales, in_place=True, is_one=True)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: None = None,
) -> torch.Tensor:
    """Reduce a tensor in place, as `allreduce` does."""
    scales = (prescale_factor, postscale_factor)
    handle = allreduce_async_(tensor, None, name, op_of(op, average), *scales, process_set)
    reduced: torch.Tensor = synchronize(handle)
    return reduced


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: None = None,
) -> int:
    """Start an `allreduce` of several tensors; return a handle for `synchronize`."""
    refuse_process_set(process_set)
    return _handle(tensors, op_of(op, average), prescale_factor, postscale_factor)


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: None = None,
) -> int:
    """Start an `allreduce` of several tensors in place; return a handle for `synchronize`."""
    refuse_process_set(process_set)
    return _handle(tensors, op_of(op, average), prescale_factor, postscale_factor, in_place=True)


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: None = None,
) -> list[torch.Tensor]:
    """Reduce several tensors in place, as `allreduce` does."""
    scales = (prescale_factor, postscale_factor)
    handle = grouped_allreduce_async_(tensors, None, name, op_of(op, average), *scales, process_set)
    reduced: list[torch.Tensor] = synchronize(handle)
    return reduced


def _handle(
    tensors: Sequence[torch.Tensor],
    op: Any,
    prescale: float,
    postscale: float,
    *,
    in_place: bool = False,
    is_one: bool = False,
) -> int:
    """Start to reduce tensors; return a handle, of one result if there `is_one`, else of a list."""
    pending = started("allreduce", tensors, op, prescale, postscale)

    def finish() -> Any:
        results: list[torch.Tensor] = pending.finish()
        if in_place:
            for tensor, reduced in zip(tensors, results, strict=True):
                tensor.detach().copy_(reduced)
            results = [*tensors]
        return results[0] if is_one else results

    return handle_of(Pending(works=pending.works, finish=finish, number=pending.number))
