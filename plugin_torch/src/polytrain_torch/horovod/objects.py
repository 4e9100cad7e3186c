"""Sends objects, parameters and optimizer states to all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from polytrain_torch.collectives.gathering import gathered
from polytrain_torch.horovod.basics import context
from polytrain_torch.horovod.call_log import completed, log_call
from polytrain_torch.horovod.exchanges import broadcast_async_
from polytrain_torch.horovod.handles import synchronize
from polytrain_torch.horovod.reductions import refuse_process_set
from polytrain_torch.private import tree_map


def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: None = None
) -> Any:
    """Return the object of the rank `root_rank`. It must be picklable."""
    refuse_process_set(process_set)
    context()
    log_call("broadcast_object", root_rank)
    values = [obj]
    dist.broadcast_object_list(values, src=root_rank)
    return values[0]


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Return the objects of all ranks, by rank. They must be picklable."""
    context()
    number = log_call("allgather_object")
    values = gathered(obj)
    completed(number)
    return values


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Replace tensors in place by those of the rank `root_rank`.

    Args:
        params: `model.state_dict()`, `model.named_parameters()`, or any dict of tensors, or
            iterable of tensors or (name, tensor) pairs.
        root_rank: the rank that has the values.

    Raises:
        ValueError: `params` is something else.
    """
    handles = [broadcast_async_(tensor, root_rank) for tensor in _tensors(params)]
    for handle in handles:
        synchronize(handle)


def _tensors(params: Any) -> list[torch.Tensor]:
    if isinstance(params, torch.Tensor) or not isinstance(params, Iterable):
        raise ValueError(
            f"params: {type(params).__name__} isn't parameters. Pass model.state_dict() or "
            "model.named_parameters()"
        )
    if isinstance(params, Mapping):
        # Ranks may have inserted them in different orders.
        listed = [params[name] for name in sorted(params)]
    else:
        listed = [each[1] if isinstance(each, tuple) else each for each in params]
    # A state may hold other values too, such as a module's extra state.
    return [each for each in listed if isinstance(each, torch.Tensor)]


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Replace an optimizer's state and options by those of the rank `root_rank`.

    Other ranks' optimizers needn't have a state yet.

    Args:
        optimizer: a `DistributedOptimizer` or any other.
        root_rank: the rank that has the state.
        model: no effect.
    """
    mine = context().get_world_rank() == root_rank
    state = broadcast_object(_on_cpu(optimizer.state_dict()) if mine else None, root_rank)
    if not mine:
        # load_state_dict moves the tensors to the parameters' devices.
        optimizer.load_state_dict(state)


def _on_cpu(state: Any) -> Any:
    """Return a state with its tensors on the CPU: other ranks don't have this rank's device."""
    return tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf, state)
