"""Refuses gradients that DDP doesn't average, which would let the ranks' models drift apart."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from polytrain_torch.private import replace_backward_engine
from polytrain_torch.virtual_workers import current

_checks: WeakKeyDictionary[torch.nn.Module, Any] = WeakKeyDictionary()
"""Prepared model → handle of the hook that checks it."""

_models: WeakSet[DistributedDataParallel] = WeakSet()
"""Models for whose parameters `torch.autograd.grad` is refused."""

PREPARE_AGAIN = (
    "Call prepare_model(model) again after unfreezing, with the model that it wraps (model.module) "
    "if it is wrapped, or freeze the parameters after preparing it."
)


def keep_frozen(model: torch.nn.Module, *, wrapped_by: str, remedy: str) -> None:
    """Have a model raise an error if it trains parameters that are frozen now.

    Calling this again replaces the check.

    Args:
        model: the model that DDP is about to wrap, or has just wrapped.
        wrapped_by: name of the user's call that wraps it, for the error.
        remedy: advice for the error.
    """
    if model in _checks:
        _checks.pop(model).remove()
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    if frozen and dist.get_world_size() > 1:
        _checks[model] = model.register_forward_pre_hook(
            partial(_refuse_trained, frozen, f"when {wrapped_by} wrapped the model", remedy)
        )


def wraps_in_ddp(accelerator: Any) -> bool:
    """Whether an `accelerate.Accelerator` uses DDP; a Transformers trainer has one too."""
    return accelerator.distributed_type in ("MULTI_CPU", "MULTI_GPU")


def _refuse_trained(
    frozen: Sequence[torch.Tensor], when: str, remedy: str, model: torch.nn.Module, _: Any
) -> None:
    if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in frozen):
        raise RuntimeError(
            f"Parameters that were frozen {when} are trained now. Their gradients aren't averaged "
            f"over the workers, so the workers' models would differ. {remedy}"
        )


def refuse_autograd_grad(model: DistributedDataParallel) -> None:
    """Refuse `torch.autograd.grad` for the trained parameters of a model, except in `no_sync`.

    DDP averages only gradients that `backward()` adds to `parameter.grad`.
    """
    _models.add(model)
    _install()


@cache
def _install() -> None:
    replace_backward_engine(_checking)


def _checking(run: Any) -> Any:
    def checked(
        outputs: Any,
        gradients: Any,
        keeps: Any,
        creates: Any,
        inputs: Any,
        *args: Any,
        accumulate_grad: bool = False,
        **kwargs: Any,
    ) -> Any:
        if not accumulate_grad:
            _refuse({id(each) for each in inputs})
        return run(
            outputs,
            gradients,
            keeps,
            creates,
            inputs,
            *args,
            accumulate_grad=accumulate_grad,
            **kwargs,
        )

    return checked


def _refuse(inputs: set[int]) -> None:
    for model in _models:
        if not model.require_backward_grad_sync and current() is None:
            continue
        for name, parameter in model.module.named_parameters():
            if id(parameter) in inputs and parameter.requires_grad:
                raise RuntimeError(
                    f"torch.autograd.grad gives this rank's gradient of {name!r}, which DDP "
                    "doesn't average over the workers: trained with it, the ranks' models drift "
                    "apart. Call loss.backward() and use parameter.grad; or, if you average it "
                    "yourself or don't train with it, call both the model and torch.autograd.grad "
                    "in `with model.no_sync():`."
                )
