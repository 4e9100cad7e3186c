"""Weighs gradients by rows where ranks have different numbers of them.

Ranks average their gradients, each of which is that of a mean over the rank's rows. The average is
that of the mean over the global batch if each gradient is multiplied by the rank's share of the
rows, times the number of ranks. Whoever gives batches says here which weight the latest one has;
whoever averages gradients has them weighted: as they enter the model's outputs, or the loss. So
they are weighted once in each backward pass, before anything is accumulated, scaled or sent.
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
    """The weight of one batch; backward passes look it up."""

    def __init__(self, value: float) -> None:
        self.value = value


class WeightedLoop:
    """One iteration over batches whose rows are known."""

    def __init__(self) -> None:
        self.weight = _EQUAL

    def given(self, weight: float, batch: Any = None) -> None:
        """The next batch is given: what is trained now is trained on it.

        Args:
            weight: of the batch.
            batch: it, for who takes it ahead: see `weight_of`.
        """
        self.weight = _EQUAL if weight == 1 else BatchWeight(weight)
        if weight != 1 or len(_taken):
            # A data set may give a tensor again.
            for tensor in _tensors(batch)[:1]:
                _taken[tensor] = weight
        if _loops[-1] is not self:
            _loops.remove(self)
            _loops.append(self)


_EQUAL = BatchWeight(1)
_taken = WeakTensorKeyDictionary()
"""The weights of batches by their first tensors, since there is one that isn't 1."""

_loops: list[WeightedLoop] = []
"""Those that aren't over. The last one has given the latest batch."""

_is_on = True


@contextmanager
def weighted_loop() -> Iterator[WeightedLoop]:
    """An iteration over batches, until its end. One within it doesn't change its weights."""
    loop = WeightedLoop()
    _loops.append(loop)
    try:
        yield loop
    finally:
        _loops.remove(loop)


def weigh_rows(enabled: bool = True) -> None:
    """Set whether gradients are weighted by rows where ranks have different numbers of them.

    They are, unless this is called with False: for losses that aren't a mean over rows, such as a
    sum, or a mean over tokens. All ranks then count the same in every average. It applies to the
    batches of shards and prepared data loaders from the call on. All ranks call this alike.
    """
    global _is_on
    _is_on = enabled


def weight_of(batch: Any) -> float:
    """The weight of a batch that may have been given before others, if it has tensors."""
    if not len(_taken):
        # It is asked with every value that a library logs.
        return 1.0
    return next((float(_taken.get(tensor, 1)) for tensor in _tensors(batch)[:1]), 1.0)


def _tensors(batch: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]


def weigh_model(model: torch.nn.Module) -> None:
    """Weigh the gradients of a model's parameters, whose averages over the ranks others make.

    Gradients that leave the model for what made its inputs, which may be another such model, are
    as if nothing was weighted.
    """
    model.register_forward_pre_hook(_weigh_inputs, with_kwargs=True)
    model.register_forward_hook(_weigh_outputs)


def weigh_backward(owner: Any) -> None:
    """Have `owner.backward(loss, …)` weigh gradients, whose averages its owner makes."""
    if not isinstance(owner.backward, partial):
        owner.backward = partial(_weighted_backward, owner.backward)


def _weighted_backward(own_backward: Any, loss: torch.Tensor, *args: Any, **options: Any) -> Any:
    weight = _current()
    if weight is not _EQUAL and loss.requires_grad:
        loss = _ScaledGradient.apply(loss, weight, False)
    return own_backward(loss, *args, **options)


def weighted_gradient(gradient: torch.Tensor) -> torch.Tensor:
    """A parameter's gradient of one backward pass, weighted."""
    weight = _current()
    return gradient if weight is _EQUAL else _scaled(gradient, weight.value)


def _current() -> BatchWeight:
    """What gradients are multiplied by now: 1 without a shard's or prepared loader's batch."""
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
        # Not a view: the caller may write to it.
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        value = ctx.weight.value
        if ctx.is_inverse:
            value = 1 / value if value else 0
        return _scaled(gradients[0], value), None, None


def _scaled(gradient: torch.Tensor, factor: float) -> torch.Tensor:
    # Of a rank without rows nothing counts, not even what isn't a number.
    return gradient * factor if factor else torch.zeros_like(gradient)


@cache
def _warn_of_unknown(kind: str) -> None:
    logger.warning(
        "The model returns a %s, in which tensors aren't found: where ranks have different numbers "
        "of rows, their gradients count the same. Return tensors, or dicts, lists or data classes "
        "of them.",
        kind,
    )
