"""Refuses `torch.autograd.grad` for parameters of DDP models.

DDP averages only gradients that `backward()` adds to `parameter.grad`. `torch.autograd.grad`
returns this rank's gradients: the ranks' models that train with them drift apart without an error.
"""

from __future__ import annotations

import weakref
from functools import cache
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from polytrain_torch.private import replace_backward_engine
from polytrain_torch.virtual_workers import current

_models: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()


def refuse_autograd_grad(model: DistributedDataParallel) -> None:
    """Refuse `torch.autograd.grad` for the trained parameters of a model, except in `no_sync`."""
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
