"""`prepare_model` and `prepare_data_loader`: make a script distributed."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from polytrain_torch.collectives.call_agreement import agree_on_call
from polytrain_torch.collectives.node_group import gradient_group
from polytrain_torch.devices import current_device
from polytrain_torch.loaders.prepared import PreparedDataLoader, sharded
from polytrain_torch.models.parallel import DataParallel, NodeDataParallel
from polytrain_torch.models.unaveraged import PREPARE_AGAIN, keep_frozen, refuse_autograd_grad
from polytrain_torch.row_weights import weigh_model
from polytrain_torch.virtual_workers import current, refuse_virtual_workers
from polytrain_torch.virtual_workers.data_parallel import in_virtual_workers

logger = logging.getLogger(__name__)


def get_device() -> torch.device:
    """Return the device of this worker: its GPU, or the CPU."""
    return current_device()


def get_devices() -> list[torch.device]:
    """Return the devices of this worker, always one."""
    return [current_device()]


def prepare_model(
    model: torch.nn.Module,
    move_to_device: bool | torch.device = True,
    parallel_strategy: str | None = "ddp",
    parallel_strategy_kwargs: Mapping[str, Any] | None = None,
    *,
    sharded_layers: Iterable[torch.nn.Module] = (),
) -> torch.nn.Module:
    """Move a model to this worker's device and distribute its training over all workers.

    Args:
        model: a model of the same architecture on every rank; rank 0's weights are sent to all.
        move_to_device: False leaves the model where it is; a device moves it there.
        parallel_strategy: "ddp" averages the gradients of replicated models; where ranks have
            different numbers of rows of a shard or prepared loader, it weights gradients by rows
            (see `weigh_rows`). The model is also wrapped on one worker, so that `no_sync`, `module`
            and `Join` work on any number. The wrapper has the model's public attributes and
            methods. `torch.autograd.grad` for its parameters raises an error outside of `no_sync`:
            DDP doesn't average its result. A model without trainable parameters isn't wrapped. On
            several workers, training parameters that were frozen raises an error: prepare the model
            again after unfreezing. With `ScalingConfig.virtual_workers`, gradients are averaged at
            the end of a loop over `micro_batches`. "fsdp" shards parameters, gradients and
            optimizer states over the workers with FSDP2. None leaves the model as it is.
        parallel_strategy_kwargs: arguments for `DistributedDataParallel`, or for `fully_shard`.
        sharded_layers: with "fsdp", parts of the model that are gathered one by one, such as
            `model.layers`. Layers on which `fully_shard` was called before keep each rank's shard
            of its own weights, because rank 0's whole weights are gone by then.

    Raises:
        ValueError: the strategy is unknown, there are `sharded_layers` without "fsdp", or the
            model is on the meta device.
    """
    if parallel_strategy not in ("ddp", "fsdp", None):
        raise ValueError(f"parallel_strategy={parallel_strategy!r}: give 'ddp', 'fsdp' or None")
    if sharded_layers and parallel_strategy != "fsdp":
        raise ValueError(
            f"sharded_layers: parallel_strategy={parallel_strategy!r} shards none. Pass "
            "parallel_strategy='fsdp', or leave them out"
        )
    if parallel_strategy == "fsdp":
        refuse_virtual_workers("parallel_strategy='fsdp'")
    agree_on_call("prepare_model")
    device = current_device() if isinstance(move_to_device, bool) else move_to_device
    if move_to_device is not False:
        if any(tensor.is_meta for tensor in chain(model.parameters(), model.buffers())):
            raise ValueError(
                "model: it is on the meta device, without values. Call "
                "model.to_empty(device=get_device()) and initialize it before; to shard it first, "
                "pass move_to_device=False."
            )
        model = model.to(device)
    if parallel_strategy == "fsdp":
        arguments = dict(parallel_strategy_kwargs or {})
        return _fully_sharded(model, sharded_layers, device, arguments)
    if parallel_strategy is None:
        return model
    keep_frozen(model, wrapped_by="prepare_model", remedy=PREPARE_AGAIN)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        # DDP raises an error for a model without trainable parameters.
        _send_weights(model)
        return model
    arguments = dict(parallel_strategy_kwargs or {})
    virtual = current()
    if device.type == "cuda":
        arguments.setdefault("device_ids", [device.index])
        arguments.setdefault("output_device", device.index)
    if virtual is not None:
        parallel: DataParallel = in_virtual_workers(model, virtual, device, arguments)
    elif arguments.keys() & {"process_group", "device_mesh"}:
        parallel = DataParallel(model, **arguments)
    else:
        parallel = NodeDataParallel(model, process_group=gradient_group(device), **arguments)
    if dist.get_world_size() > 1:
        refuse_autograd_grad(parallel)
    return parallel


def _fully_sharded(
    model: torch.nn.Module,
    layers: Iterable[torch.nn.Module],
    device: torch.device,
    arguments: dict[str, Any],
) -> torch.nn.Module:
    _warn_of_sharded(model)
    _send_weights(model)
    if "mesh" not in arguments:
        arguments["mesh"] = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in layers:
        fully_shard(layer, **arguments)
    sharded: torch.nn.Module = fully_shard(model, **arguments)
    weigh_model(sharded)
    return sharded


def _warn_of_sharded(model: torch.nn.Module) -> None:
    # `fully_shard` keeps each rank's shard of its own weights: rank 0's whole ones are gone.
    if any(map(_is_cut, model.parameters())) and dist.get_rank() == 0:
        logger.warning(
            "Layers were sharded before prepare_model, so each rank has its part of its own "
            "weights: rank 0's can't be sent any more. Pass the layers to prepare_model instead "
            "(sharded_layers=model.layers), or have all ranks begin with the same weights."
        )


def _is_cut(parameter: torch.Tensor) -> bool:
    """Whether ranks have different shards of a parameter."""
    if not isinstance(parameter, DTensor):
        return False
    sizes = zip(parameter.placements, parameter.device_mesh.shape, strict=True)
    return any(size > 1 and not placement.is_replicate() for placement, size in sizes)


def _send_weights(model: torch.nn.Module) -> None:
    """Broadcast rank 0's weights and buffers; for sharded ones, from the first replica."""
    for tensor in chain(model.parameters(), model.buffers()):
        # The user initializes tensors that have no values yet.
        if tensor.is_meta:
            continue
        if not isinstance(tensor, DTensor):
            _send(tensor.detach())
            continue
        for dimension, placement in enumerate(tensor.placements):
            if placement.is_replicate():
                _send(tensor.detach().to_local(), tensor.device_mesh.get_group(dimension))


def _send(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Broadcast the tensor of a group's first rank, in place; None is the default group."""
    # A model may stay on the CPU, and NCCL needs GPU tensors.
    sent = tensor.cuda() if dist.get_backend(group) == "nccl" else tensor
    dist.broadcast(sent, group=group, group_src=0)
    tensor.copy_(sent)


def prepare_data_loader(
    data_loader: DataLoader[Any],
    add_dist_sampler: bool = True,
    move_to_device: bool = True,
    auto_transfer: bool = True,
) -> PreparedDataLoader:
    """Split a data loader: each worker gets its own part of every epoch.

    The loader keeps its sampler, batch sampler, `persistent_workers`, `prefetch_factor` and
    everything else. A sampler that knows the rank, such as `DistributedSampler`, isn't split again,
    also inside a batch sampler. Each iteration is a new epoch, with a new order if the loader
    shuffles. Calls of a sampler's `set_epoch` work, but aren't needed.

    Checkpoints record the loader's position. A restarted training function resumes at the next
    batch, also on a different number of workers, if it prepares its loaders in the same order. A
    loader may be prepared outside the loop over epochs, or again in each epoch by the same call. A
    custom sampler draws again with the same random numbers. One that knows the rank, and isn't
    torch's `DistributedSampler`, resumes within an epoch only on the same number of workers.

    Args:
        data_loader: a loader of a map-style or iterable data set. Of an `IterableDataset`, each
            rank gets one of every `world_size` items; if they don't fill the last round, the first
            items are repeated. If the loader has `state_dict` and `load_state_dict`, or its data
            set has and there are no worker processes, checkpoints of `TrainingState` have each
            rank's position, for the same number of workers. Otherwise a restart begins the epoch
            again.
        add_dist_sampler: False leaves the loader unsplit, for example if a sampler or an iterable
            data set splits by rank itself. Its position is kept, for the same number of workers.
            Other ranks needn't make this call: rank 0 alone may prepare a loader for validation.
        move_to_device: move the tensors of each batch to this worker's device.
        auto_transfer: copy tensors in pinned memory while the device computes; False waits for
            each copy.

    Raises:
        RuntimeError: not all ranks make this call, and `add_dist_sampler` is True.
        ValueError: the attempt resumes within an epoch of an iterable data set that another number
            of workers began.
    """
    if add_dist_sampler:
        agree_on_call("prepare_data_loader")
    device = current_device() if move_to_device else None
    prepared = sharded(data_loader, device=device, is_split=not add_dist_sampler)
    prepared.non_blocking = auto_transfer
    return prepared
