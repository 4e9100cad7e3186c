"""Proves at the start of an attempt that all ranks compute the same bits.

At the end of the first loop over micro-batches all ranks run each model forward and backward, with
the input and the random numbers of rank 0's first call, and compare digests of the gradients.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from polytrain_torch.checkpoints.rank_parts import digest
from polytrain_torch.collectives.gathering import gathered
from polytrain_torch.moving import moved
from polytrain_torch.private import tree_leaves
from polytrain_torch.randomness import seed_place

logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")


class FirstCall:
    """The input of a model's first call, and its precision."""

    def __init__(
        self, model: torch.nn.Module, inputs: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        self.arguments = inputs, kwargs
        kind = _device_of(model).type
        self.precision = (
            kind,
            torch.get_autocast_dtype(kind),
            torch.is_autocast_enabled(kind),
        )


def prove(models: Sequence[torch.nn.Module], calls: Mapping[int, FirstCall]) -> None:
    """Compare gradients of all ranks. All ranks call this, and seed their generators after it.

    Args:
        models: the models, in the same order on all ranks.
        calls: rank 0's calls, by the model's number.

    Raises:
        RuntimeError: a rank has others than rank 0.
    """
    sent: list[Any] = [_sendable(calls) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(sent, src=0)
    if sent[0] is None:
        return
    by_rank = gathered({n: _gradients(models[n], *call) for n, call in sent[0].items()})
    others = [rank for rank, theirs in enumerate(by_rank) if theirs != by_rank[0]]
    if others:
        raise RuntimeError(
            f"Rank {others[0]} computes other gradients than rank 0 from the same micro-batch, "
            "weights and random numbers, so the run can't be the same at any number of workers. "
            "Give all workers the same type of CPU or GPU and the same versions of libraries; a "
            "model must not draw random numbers from outside torch, NumPy and Python, nor keep "
            "state from call to call that isn't a buffer."
        )
    logger.info("Exact over world sizes: yes; all ranks have computed the same gradients.")


def _sendable(calls: Mapping[int, FirstCall]) -> dict[int, Any] | None:
    sent = {n: (moved(each.arguments, _CPU), each.precision) for n, each in calls.items()}
    try:
        pickle.dumps(sent)
    except (pickle.PicklingError, AttributeError, TypeError, RuntimeError) as error:
        logger.warning(
            "Exact over world sizes: not proven, as the model's input can't be sent to other "
            "ranks: %s",
            error,
        )
        return None
    return sent


def _device_of(model: torch.nn.Module) -> torch.device:
    return next(model.parameters()).device


def _gradients(model: torch.nn.Module, arguments: Any, precision: Any) -> bytes:
    """Return a digest of the gradients, and leave the model as it was."""
    kind, dtype, is_enabled = precision
    parameters = [each for each in model.parameters() if each.requires_grad]
    earlier = [each.grad for each in parameters]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    for each in parameters:
        each.grad = None
    seed_place("proof")
    inputs, kwargs = moved(arguments, _device_of(model))
    with torch.autocast(kind, dtype=dtype, enabled=is_enabled):
        outputs = tree_leaves(model(*inputs, **kwargs))
    trained = [each for each in outputs if isinstance(each, torch.Tensor) and each.requires_grad]
    if trained:
        torch.stack([each.abs().float().sum() for each in trained]).sum().backward()
    found = digest([each.grad for each in parameters])
    for each, gradient in zip(parameters, earlier, strict=True):
        each.grad = gradient
    for buffer, value in buffers:
        buffer.copy_(value)
    return found
