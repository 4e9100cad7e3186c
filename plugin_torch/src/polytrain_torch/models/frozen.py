"""Refuses to train parameters that were frozen when DDP wrapped them: it doesn't average them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

_checks: WeakKeyDictionary[torch.nn.Module, Any] = WeakKeyDictionary()
"""Prepared model → handle of the hook that checks it."""


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
