"""Horovod's `init`, ranks and sizes, and the libraries that torch is built with."""

from __future__ import annotations

import torch
import torch.distributed as dist

from polytrain import NotInWorkerError, get_context
from polytrain.extension import Context
from polytrain_torch.devices import current_device
from polytrain_torch.horovod.call_log import begin, end
from polytrain_torch.virtual_workers import refuse_virtual_workers


class HorovodInternalError(RuntimeError):
    """Horovod's error for a lost peer, for `except` clauses.

    It is never raised here: the run ends the attempt, and starts all ranks again.
    """


_is_initialized = False


def init(comm: None = None, process_sets: None = None) -> None:
    """Begin to use the run's process group; in a script, create it if there is none.

    Args:
        comm: refused; the run's workers are the ranks.
        process_sets: refused; the only one has all ranks.

    Raises:
        NotInWorkerError: the code isn't a training function or script that polytrain runs.
        NotImplementedError: an argument is refused.
    """
    refuse_virtual_workers("Horovod")
    global _is_initialized
    if comm is not None:
        raise NotImplementedError("comm: the run's workers are the ranks. Leave it out")
    if process_sets:
        raise NotImplementedError(
            "process_sets: all ranks are one process set here. Leave it out, and make a group of "
            "ranks with torch.distributed.new_group"
        )
    try:
        get_context()
    except NotInWorkerError:
        raise NotInWorkerError(
            "hvd.init() works only where polytrain runs the code: pass the function to "
            "make_trainer('torch', function), or the file as make_trainer('torch', script='…')."
        ) from None
    if not dist.is_initialized():
        dist.init_process_group("nccl" if current_device().type == "cuda" else "gloo")
    if not _is_initialized:
        _is_initialized = True
        begin()


def shutdown() -> None:
    """Stop using the process group; the run closes it."""
    global _is_initialized
    _is_initialized = False
    end()


def is_initialized() -> bool:
    """Whether `init` was called in this attempt."""
    return _is_initialized and dist.is_initialized()


def context() -> Context:
    """Return this process's context in the run.

    Raises:
        ValueError: `init` wasn't called before.
    """
    if not is_initialized():
        raise ValueError("Horovod has not been initialized; use hvd.init().")
    return get_context()


def rank() -> int:
    """Return the rank of this process among all ranks, from 0."""
    return context().get_world_rank()


def size() -> int:
    """Return the number of ranks."""
    return context().get_world_size()


def local_rank() -> int:
    """Return the rank of this process on its node, from 0."""
    return context().get_local_rank()


def local_size() -> int:
    """Return the number of ranks on this node."""
    return context().get_local_world_size()


def cross_rank() -> int:
    """Return the position of this node, from 0, among nodes that have this local rank."""
    return _nodes_with_local_rank().index(context().get_node_rank())


def cross_size() -> int:
    """Return the number of nodes that have this local rank."""
    return len(_nodes_with_local_rank())


def is_homogeneous() -> bool:
    """Whether all nodes have the same number of ranks."""
    return len({member.local_world_size for member in context().world.members}) == 1


def _nodes_with_local_rank() -> list[int]:
    local = local_rank()
    members = context().world.members
    return sorted(member.node_rank for member in members if member.local_rank == local)


def mpi_threads_supported() -> bool:
    """Return False: ranks don't communicate by MPI."""
    context()
    return False


def mpi_enabled() -> bool:
    """Return False: ranks don't communicate by MPI."""
    return False


def mpi_built() -> bool:
    """Return False: nothing here uses MPI."""
    return False


def gloo_enabled() -> bool:
    """Whether gloo connects the ranks."""
    return dist.is_initialized() and "gloo" in dist.get_backend()


def gloo_built() -> bool:
    """Whether torch is built with gloo."""
    return dist.is_gloo_available()


def nccl_built() -> int:
    """Return NCCL's version as a number, such as 22304 for 2.23.4; 0 if torch lacks NCCL."""
    if not dist.is_nccl_available():
        return 0
    major, minor, patch = (*torch.cuda.nccl.version(), 0, 0)[:3]
    return int(major) * 10_000 + int(minor) * 100 + int(patch)


def ddl_built() -> bool:
    """Return False: nothing here uses IBM's DDL."""
    return False


def ccl_built() -> bool:
    """Return False: nothing here uses oneCCL."""
    return False


def cuda_built() -> bool:
    """Whether torch is built with CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Whether torch is built with ROCm."""
    return torch.version.hip is not None
