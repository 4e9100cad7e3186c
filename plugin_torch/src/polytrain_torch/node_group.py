"""The process group that sums gradients where all ranks are on one node and have no GPU.

gloo takes every sum through sockets and threads of its own: of a small network's step that is a
fifth. Here it is `SharedSums`'s. Whatever else is asked of the group, the default group does.
"""

from __future__ import annotations

import mmap
import os
from datetime import timedelta
from functools import cache, partialmethod
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future

from polytrain_torch.parallel import DataParallel
from polytrain_torch.shared_sums import SharedSums, can_share_memory, size_for

NAME = "polytrain_node"
"""What `torch.distributed.get_backend` calls it."""

_KEY = "memory"
_CPU = torch.device("cpu")


def gradient_group(device: torch.device) -> Any:
    """The group for gradients: the default one, unless shared memory reaches all ranks.

    All ranks call this.

    Args:
        device: of the gradients.
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
        timeout = default._get_backend(_CPU).options._timeout
        _of_default = default, dist.new_group(backend=NAME, timeout=timeout)
    return _of_default[1]


_of_default: tuple[Any, Any] | None = None
"""The default group, and the one for its gradients."""


def forget_group() -> None:
    """Let go of the groups that were: with the default one go its ports."""
    global _of_default
    _of_default = None


class NodeDataParallel(DataParallel):
    """DDP by a `gradient_group`, which stands for the default group."""

    @property
    def join_process_group(self) -> Any:
        """Of all ranks, as that of others in the same `Join`."""
        return dist.group.WORLD

    def _check_default_group(self) -> None:
        """May it be copied, and pickled? It may: what comes of it has the default group."""


def _done(tensors: list[torch.Tensor]) -> dist.Work:
    """Work that was done before anybody could wait for it.

    Not of a class of Python's: DDP may keep it for longer than Python would.
    """
    future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
    future.set_result(tensors)
    return _create_work_from_future(future)


class NodeGroup(dist.ProcessGroup):
    """Sums and broadcasts in shared memory."""

    def __init__(self, rank: int, world_size: int, sums: SharedSums | None) -> None:
        """
        Args:
            rank: this one.
            world_size: ranks.
            sums: None where a rank couldn't reach the memory: all is the default group's then.
        """
        super().__init__(rank, world_size)
        self._sums = sums

    def getBackendName(self) -> str:  # torch's
        return NAME

    def allreduce(self, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        """Of a list of tensors with options, as DDP and torch's functions call it, or otherwise."""
        if self._sums is None or not _are_summed(tensors, *args, **kwargs):
            return dist.group.WORLD.allreduce(tensors, *args, **kwargs)
        for tensor in tensors:
            self._sums.add_up(tensor)
        return _done(tensors)

    def broadcast(self, tensors: Any, *args: Any, **kwargs: Any) -> Any:
        """The same."""
        opts = args[0] if args else None
        is_known = isinstance(tensors, list) and isinstance(opts, dist.BroadcastOptions)
        if self._sums is None or not is_known or not all(map(_is_plain, tensors)):
            return dist.group.WORLD.broadcast(tensors, *args, **kwargs)
        for tensor in tensors:
            self._sums.send(tensor, source=opts.rootRank)
        return _done(tensors)


def _by_default_group(_: NodeGroup, name: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(dist.group.WORLD, name)(*args, **kwargs)


for _name in (
    "_allgather_base",
    "_get_backend",
    "_reduce_scatter_base",
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
    size, sums = size_for(world_size), None
    descriptor = _descriptor(store, rank, size)
    can_open = torch.tensor([int(descriptor is not None)])
    dist.all_reduce(can_open, dist.ReduceOp.MIN)
    if descriptor is not None:
        if can_open.item():
            memory = mmap.mmap(descriptor, size)
            seconds = timeout.total_seconds()
            sums = SharedSums(memory, rank=rank, world_size=world_size, timeout_s=seconds)
        os.close(descriptor)
    return NodeGroup(rank, world_size, sums)


def _descriptor(store: dist.Store, rank: int, size: int) -> int | None:
    """Of memory that rank 0 makes and the others open through its process; None if they can't."""
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
    # In another namespace of processes that number is somebody else.
    if str(os.fstat(descriptor).st_ino) == number:
        return descriptor
    os.close(descriptor)
    return None


@cache
def _register() -> None:
    """Not before it is needed: torch does some things otherwise where others' backends are."""
    dist.Backend.register_backend(NAME, _create, devices=["cpu"])
