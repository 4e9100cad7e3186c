"""The two lines that make a script distributed: prepare_model and prepare_data_loader."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from polytrain_torch.data import PreparedDataLoader, sharded
from polytrain_torch.engine import current_device
from polytrain_torch.node_group import NodeDataParallel, gradient_group
from polytrain_torch.parallel import DataParallel


def get_device() -> torch.device:
    """The device of this worker: the GPU that it was given, or the CPU."""
    return current_device()


def prepare_model(
    model: torch.nn.Module,
    *,
    move_to_device: bool | torch.device = True,
    parallel_strategy: str | None = "ddp",
    parallel_strategy_kwargs: Mapping[str, Any] | None = None,
) -> torch.nn.Module:
    """Move a model to this worker's device and have it trained by all workers.

    Args:
        model: the same on every rank; rank 0's weights are sent to all.
        move_to_device: False leaves it where it is; a device moves it there.
        parallel_strategy: "ddp" averages the gradients of whole models. The model is wrapped, on
            one worker too, so that `no_sync`, `module` and `Join` work on any number; its public
            attributes and methods can be used through the wrapper. "fsdp" shards parameters,
            gradients and optimizer states over the workers, as FSDP2 does. Layers that are to be
            gathered one by one are given to `torch.distributed.fsdp.fully_shard` before. None
            leaves the model as it is.
        parallel_strategy_kwargs: passed on to `DistributedDataParallel`, or to `fully_shard`.

    Raises:
        ValueError: if the strategy is none of them, or the model has no values to move.
    """
    if parallel_strategy not in ("ddp", "fsdp", None):
        raise ValueError(f"parallel_strategy={parallel_strategy!r}: give 'ddp', 'fsdp' or None")
    device = current_device() if isinstance(move_to_device, bool) else move_to_device
    if move_to_device is not False:
        if any(tensor.is_meta for tensor in chain(model.parameters(), model.buffers())):
            raise ValueError(
                "model: it is on the meta device, without values. Give it some before, by "
                "model.to_empty(device=get_device()) and its initialization; to shard it first, "
                "pass move_to_device=False."
            )
        model = model.to(device)
    if parallel_strategy == "fsdp":
        return _fully_sharded(model, device, dict(parallel_strategy_kwargs or {}))
    trained = any(parameter.requires_grad for parameter in model.parameters())
    # DDP refuses a model that has nothing to train.
    if parallel_strategy is None or not trained:
        return model
    arguments = dict(parallel_strategy_kwargs or {})
    if device.type == "cuda":
        arguments.setdefault("device_ids", [device.index])
        arguments.setdefault("output_device", device.index)
    if arguments.keys() & {"process_group", "device_mesh"}:
        return DataParallel(model, **arguments)
    return NodeDataParallel(model, process_group=gradient_group(device), **arguments)


def _fully_sharded(
    model: torch.nn.Module, device: torch.device, arguments: dict[str, Any]
) -> torch.nn.Module:
    for tensor in chain(model.parameters(), model.buffers()):
        # What is sharded already, or has no values yet, is the user's.
        if not isinstance(tensor, DTensor) and not tensor.is_meta:
            dist.broadcast(tensor.detach(), src=0)
    if "mesh" not in arguments:
        arguments["mesh"] = init_device_mesh(device.type, (dist.get_world_size(),))
    sharded: torch.nn.Module = fully_shard(model, **arguments)
    return sharded


def prepare_data_loader(
    loader: DataLoader[Any], *, add_dist_sampler: bool = True, move_to_device: bool = True
) -> PreparedDataLoader:
    """Have a data loader give each worker its own part of every epoch.

    The user's sampler, batch sampler, `persistent_workers`, `prefetch_factor` and everything else
    stay. A loader that is split by a `DistributedSampler` already is left as it is split. Each
    iteration is a new epoch, with another order where the loader shuffles.
    `loader.sampler.set_epoch` may be called, and needn't be.

    Checkpoints record how far the loader has come, and a restarted training function goes on at
    that batch, on another number of workers too: it has to prepare its loaders in the same order. A
    sampler of the user's own is drawn anew, with torch's random numbers as they were.

    Args:
        loader: of an `IterableDataset`, each rank gets one of every `world_size` items, and what
            is left for no full round goes to nobody; a restart begins its epoch anew.
        add_dist_sampler: False to leave the loader unsplit, such as an iterable data set that
            looks at the rank itself.
        move_to_device: move the tensors of each batch to this worker's device.
    """
    device = current_device() if move_to_device else None
    if add_dist_sampler:
        return sharded(loader, device=device)
    return PreparedDataLoader(loader, device=device)
