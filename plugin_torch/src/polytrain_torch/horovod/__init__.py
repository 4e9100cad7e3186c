"""Horovod's interface over the run's process group: `import polytrain_torch.horovod as hvd`.

With this import, a Horovod script runs as a training function of `make_trainer("torch", …)` or as
its script. Names, arguments and defaults are those of `horovod.torch` 0.28.
"""

from __future__ import annotations

from typing import Any

from polytrain_torch.horovod import elastic
from polytrain_torch.horovod.basics import (
    HorovodInternalError,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
)
from polytrain_torch.horovod.exchanges import (
    allgather,
    allgather_async,
    alltoall,
    alltoall_async,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
    reducescatter,
    reducescatter_async,
)
from polytrain_torch.horovod.handles import poll, synchronize
from polytrain_torch.horovod.joining import barrier, join
from polytrain_torch.horovod.objects import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from polytrain_torch.horovod.optimizer import DistributedOptimizer
from polytrain_torch.horovod.reductions import (
    Adasum,
    Average,
    Compression,
    Max,
    Min,
    Product,
    Sum,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
)
from polytrain_torch.horovod.sync_batch_norm import SyncBatchNorm

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "Product",
    "Sum",
    "SyncBatchNorm",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "rocm_built",
    "shutdown",
    "size",
    "synchronize",
]

_ONE_SET = "all ranks are one process set here. Make a group of ranks with torch.distributed."

MISSING = {
    "ProcessSet": _ONE_SET,
    "add_process_set": _ONE_SET,
    "remove_process_set": _ONE_SET,
    "global_process_set": f"{_ONE_SET} Leave process_set out",
    "grouped_reducescatter": "call hvd.reducescatter for each tensor",
    "grouped_reducescatter_async": "call hvd.reducescatter_async for each tensor",
    "sparse_allreduce_async": "hvd.DistributedOptimizer sums sparse gradients; sum another sparse "
    "tensor with hvd.allreduce(tensor.to_dense())",
    "start_timeline": "there is no timeline. torch.profiler records collective operations",
    "stop_timeline": "there is no timeline. torch.profiler records collective operations",
    "run": "make_trainer('torch', function, scaling_config=ScalingConfig(num_workers=…)).fit() "
    "starts the workers",
}
"""Horovod's names that are missing here, and what to do instead."""


def __getattr__(name: str) -> Any:
    if name in MISSING:
        raise AttributeError(f"polytrain_torch.horovod has no {name}: {MISSING[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
