"""A process group that all-reduces gradients in shared memory, for CPU ranks on one node.

gloo's all-reduce uses sockets and threads, which takes a fifth of a small network's step. This
group uses `SharedSums`, and forwards all other operations to the default group.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from datetime import timedelta
from functools import cache, partial, partialmethod
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from polytrain_torch.collectives.operation_queue import (
    Operation,
    OperationQueue,
    forget_operations,
)
from polytrain_torch.collectives.shared_sums import SharedSums, can_share_memory, size_for
from polytrain_torch.private import FORWARDED_OPERATIONS, timeout_of, work_of
from polytrain_torch.virtual_workers import current

NAME = "polytrain_node"
"""The backend's name in `torch.distributed.get_backend`."""

_KEY = "memory"
_CPU = torch.device("cpu")


def gradient_group(device: torch.device) -> Any:
    """Return the process group for gradients on a device. All ranks call this.

    It is a `NodeGroup` if all ranks can share memory, and else the default group.
    """
    default = dist.group.WORLD
    if (
        device.type != "cpu"
        or os.environ.get("LOCAL_WORLD_SIZE") != str(dist.get_world_size())
        or dist.get_backend() != "gloo"
        or not can_share_memory()
    ):
        return default
    global _of_default
    if _of_default is None or _of_default[0] is not default:
        _register()
        _of_default = default, dist.new_group(backend=NAME, timeout=timeout_of(default))
    return _of_default[1]


_of_default: tuple[Any, Any] | None = None
"""The default group, and the gradient group made for it."""


def forget_group() -> None:
    """Release the groups, so that the default group's ports are freed."""
    global _of_default
    _of_default = None
    forget_operations()


class NodeGroup(dist.ProcessGroup):
    """Sums and broadcasts in shared memory."""

    def __init__(self, rank: int, world_size: int, sums: SharedSums | None) -> None:
        """Without `sums`, as where a rank can't open the memory, the default group does all."""
        super().__init__(rank, world_size)
        self._sums = sums
        self._queue = OperationQueue()

    def getBackendName(self) -> str:  # torch's
        return NAME

    # DDP calls these two in a compiled model's forward, and torch.compile can't trace them.
    @torch.compiler.disable
    def allreduce(self, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        """Sum tensors over ranks in place. DDP and torch's functions pass options, others don't."""
        sums = self._sums
        # Virtual workers add up by another tree than that of ranks; see `add_up`.
        if sums is None or sums.virtual_workers or not _are_summed(tensors, *args, **kwargs):
            return dist.group.WORLD.allreduce(tensors, *args, **kwargs)
        opts = kwargs.get("opts", args[0] if args else None)
        return self._run(
            chain.from_iterable(sums.add_up([each]) for each in tensors), tensors, opts
        )

    @torch.compiler.disable
    def broadcast(self, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        """Broadcast a list of tensors from one rank, in place."""
        opts: Any = args[0] if args else None
        is_known = isinstance(tensors, list) and isinstance(opts, dist.BroadcastOptions)
        if self._sums is None or not is_known or not all(map(_is_plain, tensors)):
            return dist.group.WORLD.broadcast(tensors, *args, **kwargs)
        send = partial(self._sums.send, source=opts.rootRank)
        return self._run(chain.from_iterable(map(send, tensors)), tensors, opts)

    @property
    def shares_memory(self) -> bool:
        """Whether all ranks can open the memory."""
        return self._sums is not None

    def add_up(self, sums: Sequence[Sequence[torch.Tensor]]) -> None:
        """Replace the first sum by that over all virtual workers; see `SharedSums.add_up`."""
        assert self._sums is not None
        self._begin(self._sums.add_up(*sums), sums, blocks=True)

    def any_rank(self, condition: bool) -> bool:
        """Whether a condition holds on any rank. All ranks call this together."""
        assert self._sums is not None
        held: list[bool] = []
        self._begin(self._sums.vote(condition, held), held, blocks=True)
        return held[0]

    def _run(self, operation: Operation, tensors: list[torch.Tensor], opts: Any) -> dist.Work:
        # If the caller will wait, raise exceptions here: waiting for this kind of work raises none.
        blocks = not getattr(opts, "asyncOp", True)
        return work_of(self._begin(operation, tensors, blocks=blocks))

    def _begin(self, operation: Operation, result: Any, *, blocks: bool) -> Any:
        return self._queue.run(operation, result, blocks=blocks)


def _by_default_group(_: NodeGroup, name: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(dist.group.WORLD, name)(*args, **kwargs)


for _name in (
    *FORWARDED_OPERATIONS,
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "gather",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
):
    setattr(NodeGroup, _name, partialmethod(_by_default_group, _name))


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.device == _CPU and tensor.is_contiguous()


def _are_summed(tensors: Any, opts: Any = None, **_: Any) -> bool:
    return (
        isinstance(tensors, list)
        and isinstance(opts, dist.AllreduceOptions | None)
        and (opts is None or opts.reduceOp == dist.ReduceOp.SUM)
        and all(_is_plain(tensor) and tensor.is_floating_point() for tensor in tensors)
    )


def _create(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> NodeGroup:
    virtual = current()
    count = None if virtual is None else virtual.count
    size, sums = size_for(world_size, count), None
    descriptor = _descriptor(store, rank, size)
    can_open = torch.tensor([int(descriptor is not None)])
    dist.all_reduce(can_open, dist.ReduceOp.MIN)
    if descriptor is not None:
        if can_open.item():
            memory = mmap.mmap(descriptor, size)
            seconds = timeout.total_seconds()
            sums = SharedSums(
                memory,
                rank=rank,
                world_size=world_size,
                timeout_s=seconds,
                virtual_workers=count,
            )
        os.close(descriptor)
    return NodeGroup(rank, world_size, sums)


def _descriptor(store: dist.Store, rank: int, size: int) -> int | None:
    """Open memory that rank 0 creates, via its /proc entry; return None if that fails."""
    if rank == 0:
        descriptor = os.memfd_create("polytrain-sums")
        os.ftruncate(descriptor, size)
        store.set(_KEY, f"/proc/{os.getpid()}/fd/{descriptor} {os.fstat(descriptor).st_ino}")
        return descriptor
    path, number = store.get(_KEY).decode().split()
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:
        return None
    # In another PID namespace, that number may be another process.
    if str(os.fstat(descriptor).st_ino) == number:
        return descriptor
    os.close(descriptor)
    return None


@cache
def _register() -> None:
    """Register the backend. Only when needed: torch behaves differently with custom backends."""
    dist.Backend.register_backend(NAME, _create, devices=["cpu"])
