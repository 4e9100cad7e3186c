"""Weights gradients by rows if ranks have different numbers of rows.

Each rank's gradient is that of a mean over its rows. The average over ranks is the gradient of the
mean over the global batch if each rank's gradient is multiplied by its weight: its share of the
rows, times the number of ranks. Loaders set the weight of their latest batch here. Hooks on the
model's outputs or on the loss apply it once in each backward pass, before gradients are
accumulated, scaled or sent.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import fields, is_dataclass
from functools import cache, partial
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from polytrain_torch.private import tree_leaves, tree_map

logger = logging.getLogger(__name__)


class BatchWeight:
    """The weight of one batch. Backward passes read it."""

    def __init__(self, value: float) -> None:
        self.value = value


class WeightedLoop:
    """One iteration over batches, with the weight of the latest batch."""

    def __init__(self) -> None:
        self.weight = _EQUAL

    def given(self, weight: float, batch: Any = None) -> None:
        """Set the weight of the batch that is yielded next.

        With the batch itself, `weight_of` finds its weight even if it is prefetched.
        """
        self.weight = _EQUAL if weight == 1 else BatchWeight(weight)
        if weight != 1 or len(_taken):
            # Store weights of 1 too: a data set may yield the same tensor again.
            for tensor in _tensors(batch)[:1]:
                _taken[tensor] = weight
        if _loops[-1] is not self:
            _loops.remove(self)
            _loops.append(self)


_EQUAL = BatchWeight(1)
_taken = WeakTensorKeyDictionary()
"""Weights by each batch's first tensor, from the first weight other than 1 on."""

_loops: list[WeightedLoop] = []
"""Iterations that aren't over. The last one has yielded the latest batch."""

_is_on = True


@contextmanager
def weighted_loop() -> Iterator[WeightedLoop]:
    """Register an iteration over batches until its end. A nested one doesn't change its weight."""
    loop = WeightedLoop()
    _loops.append(loop)
    try:
        yield loop
    finally:
        _loops.remove(loop)


def weigh_rows(enabled: bool = True) -> None:
    """Set whether gradients are weighted by rows if ranks have different numbers of rows.

    By default they are. Call this with False for losses that aren't a mean over rows, such as a sum
    or a mean over tokens: then all ranks count the same in every average. It applies to later
    batches of shards and prepared data loaders. All ranks make the same call.
    """
    global _is_on
    _is_on = enabled


def weight_of(batch: Any) -> float:
    """Return the weight of a batch, which may be prefetched; 1 if it has no tensors."""
    if not len(_taken):
        # Fast path: libraries call this for every value that they log.
        return 1.0
    return next((float(_taken.get(tensor, 1)) for tensor in _tensors(batch)[:1]), 1.0)


def _tensors(batch: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]


def weigh_model(model: torch.nn.Module) -> None:
    """Weight the gradients of a model's parameters, before others average them over ranks.

    Gradients of the model's inputs stay unweighted: another such model may have made them.
    """
    model.register_forward_pre_hook(_weigh_inputs, with_kwargs=True)
    model.register_forward_hook(_weigh_outputs)


def weigh_backward(owner: Any) -> None:
    """Have `owner.backward(loss, …)` weight gradients, before the owner averages them."""
    if not isinstance(owner.backward, partial):
        owner.backward = partial(_weighted_backward, owner.backward)


def _weighted_backward(own_backward: Any, loss: torch.Tensor, *args: Any, **options: Any) -> Any:
    weight = _current()
    if weight is not _EQUAL and loss.requires_grad:
        loss = _ScaledGradient.apply(loss, weight, False)
    return own_backward(loss, *args, **options)


def weighted_gradient(gradient: torch.Tensor) -> torch.Tensor:
    """Return a parameter's gradient of one backward pass, weighted."""
    weight = _current()
    return gradient if weight is _EQUAL else _scaled(gradient, weight.value)


def _current() -> BatchWeight:
    """Return the current weight: 1 without a batch of a shard or prepared loader."""
    return _loops[-1].weight if _is_on and _loops else _EQUAL


def _weigh_inputs(_: Any, args: Any, kwargs: Any) -> Any:
    weight = _current()
    if weight is _EQUAL or not torch.is_grad_enabled():
        return None
    return _weighted_parts((args, kwargs), weight, True)


def _weigh_outputs(_: Any, __: Any, output: Any) -> Any:
    weight = _current()
    if weight is _EQUAL or not torch.is_grad_enabled():
        return None
    return _weighted_parts(output, weight, False)


@torch.compiler.disable
def _weighted_parts(parts: Any, weight: BatchWeight, is_inverse: bool) -> Any:
    def of_part(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            if not part.requires_grad:
                return part
            return _ScaledGradient.apply(part, weight, is_inverse)
        if is_dataclass(part) and not isinstance(part, type):
            part = copy(part)
            for field in fields(part):
                value = _weighted_parts(getattr(part, field.name), weight, is_inverse)
                object.__setattr__(part, field.name, value)
        elif not is_inverse and hasattr(part, "__dict__"):
            _warn_of_unknown(type(part).__qualname__)
        return part

    return tree_map(of_part, parts)


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, weight: BatchWeight, is_inverse: bool) -> Any:
        ctx.weight, ctx.is_inverse = weight, is_inverse
        # A copy, not a view: the caller may write to it.
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        value = ctx.weight.value
        if ctx.is_inverse:
            value = 1 / value if value else 0
        return _scaled(gradients[0], value), None, None


def _scaled(gradient: torch.Tensor, factor: float) -> torch.Tensor:
    # A rank without rows counts nothing: 0 * NaN would be NaN.
    return gradient * factor if factor else torch.zeros_like(gradient)


@cache
def _warn_of_unknown(kind: str) -> None:
    logger.warning(
        "The model returns a %s, in which tensors aren't found: where ranks have different numbers "
        "of rows, their gradients count the same. Return tensors, or dicts, lists or data classes "
        "of them.",
        kind,
    )
