"""The private names of torch, Accelerate, DeepSpeed and Transformers that polytrain uses.

What a newer version may rename stands here alone, each with the reason why no public name does. Of
the libraries nothing is imported here; `lightning.private` has Lightning's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future
from torch.autograd import Variable
from torch.distributed import distributed_c10d
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves, tree_map

__all__ = [
    "ANY_BATCH_NORM",
    "FORWARDED_OPERATIONS",
    "PARAMETER_CLONE",
    "SHARD_LIST_GLOBALS",
    "Accelerated",
    "add_event",
    "after_backward",
    "backward_pass",
    "clear_mesh_caches",
    "deepspeed_config",
    "default_store",
    "fsdp_state",
    "operations_launched",
    "original_module",
    "process_groups",
    "replace_backward_engine",
    "replace_end_of_step",
    "timeout_of",
    "tree_leaves",
    "tree_map",
    "work_of",
    "write_events",
]

# torch's own `tree_map` is what its modules use for batches of any structure. No public module has
# it for tensors in dicts, lists, tuples and the classes that libraries have registered.

ANY_BATCH_NORM: Any = _BatchNorm
"""The base class of torch's batch norms of any dimension; `BatchNorm1d` to `3d` check theirs."""

FORWARDED_OPERATIONS = ("_allgather_base", "_get_backend", "_reduce_scatter_base")
"""Operations of a process group that torch calls by these names alone."""

PARAMETER_CLONE: Any = torch._C.TensorBase.clone
"""What `copy.deepcopy` of a parameter calls: a mode sees it as this function."""

SHARD_LIST_GLOBALS = frozenset(
    {
        *(
            ("torch.distributed.checkpoint.metadata", name)
            for name in (
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("torch", "Size"),
    }
)
"""What the list of a sharded checkpoint's tensors is pickled with; it has no other format."""


def original_module(module: torch.nn.Module) -> torch.nn.Module | None:
    """Return the module that `torch.compile` has wrapped; None if it is no wrapper.

    The wrapper has no public name for it, and its `state_dict` has a prefix in all names.
    """
    return getattr(module, "_orig_mod", None)


def replace_backward_engine(make: Callable[[Any], Any]) -> None:
    """Replace what runs all backward passes, in this process.

    A script may have imported `torch.autograd.grad` itself, and this is what it calls.

    Args:
        make: returns the function to call instead, for torch's own.
    """
    module: Any = torch.autograd
    module._engine_run_backward = make(module._engine_run_backward)


def backward_pass() -> int:
    """Return the number of the backward pass that runs; hooks get none."""
    return torch._C._current_graph_task_id()


def after_backward(callback: Callable[[], None]) -> None:
    """Have the backward pass that runs call this at its end, as DDP does; there is no hook."""
    Variable._execution_engine.queue_callback(callback)


def default_store() -> dist.Store:
    """Return the store of the default process group, which a script may have made."""
    return distributed_c10d._get_default_store()


def process_groups() -> Any:
    """Return torch's registry of process groups: its groups, and the count that names new ones."""
    return distributed_c10d._world


def operations_launched() -> int:
    """Return how many operations of the default group this rank has launched.

    Only the group knows it: users call torch's functions themselves.
    """
    return int(dist.group.WORLD._get_sequence_number_for_group())


def timeout_of(group: Any, device: torch.device) -> Any:
    """Return the timeout of a group of gloo, for a group beside it."""
    return group._get_backend(device).options._timeout


def work_of(future: Any) -> dist.Work:
    """Return the work that a future completes.

    A class in Python that derives from `Work` won't do: DDP may keep it after Python has released
    it.
    """
    return _create_work_from_future(future)


def clear_mesh_caches() -> None:
    """Clear the results that torch keeps for operations on sharded tensors.

    A result holds the mesh of the first operation like it, with the names of its process groups. A
    later mesh of the same process is equal to it, also if its groups have different names.
    """
    if "torch.distributed.tensor._api" in sys.modules:
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()


def fsdp_state(module: Any) -> Any:
    """Return what FSDP2 keeps of a module, whose hooks can't be copied."""
    return module._get_fsdp_state()


def add_event(writer: Any, event: Any, step: int) -> None:
    """Write an event of any kind with a `SummaryWriter`, whose methods write some kinds only."""
    writer._get_file_writer().add_event(event, step)


class Accelerated:
    """What an `accelerate.Accelerator` has prepared; it has public names for none of it."""

    def __init__(self, accelerator: Any) -> None:
        self.models: list[Any] = accelerator._models
        self.optimizers: list[Any] = accelerator._optimizers
        self.schedulers: list[Any] = accelerator._schedulers
        self.registered: list[Any] = accelerator._custom_objects


def deepspeed_config(engine: Any) -> Any:
    """Return the configuration of a DeepSpeed engine, which can't be set once it is made."""
    return engine._config


def replace_end_of_step(trainer: Any, make: Callable[[Any], Any]) -> None:
    """Replace what a trainer of Transformers calls at the end of each step and each epoch.

    After this no callback is called that may stop the training.

    Args:
        trainer: a `transformers.Trainer`.
        make: returns the function to call instead, for the trainer's own.
    """
    trainer._maybe_log_save_evaluate = make(trainer._maybe_log_save_evaluate)


def write_events(callback: Any, arguments: Any) -> None:
    """Have a `TensorBoardCallback` of Transformers open its writer, which it opens too late."""
    callback._init_summary_writer(arguments)
