"""A DDP class with the attributes and methods of the model that it wraps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from inspect import ismethod
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from polytrain_torch.private import uncompiled
from polytrain_torch.row_weights import weigh_model

models_in_ddp: WeakSet[torch.nn.Module] = WeakSet()
"""Models whose buffers DDP broadcasts from rank 0 before each step."""

prepared_models: WeakSet[DistributedDataParallel] = WeakSet()
"""The DDP models that `prepare_model` or a trainer has made in this process."""

after_forward: list[Callable[[], None]] = []
"""Called when a model has computed its output, before gradients are averaged."""


class DataParallel(DistributedDataParallel):
    """DDP that also has the model's public attributes and methods.

    DDP averages only gradients of its own `forward`. Getting a submodule, or running the model with
    gradients in another method, would bypass it, and raises an error.
    """

    is_virtual = False
    """Whether virtual workers average its gradients and send its buffers, instead of DDP."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        weigh_model(self)
        prepared_models.add(self)
        if self.broadcast_buffers and not self.is_virtual:
            models_in_ddp.add(self.module)
        # Attributes set so far are DDP's own, even if the model has the same name, such as `dim`.
        self._is_wrapped = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        if self.training and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            for call in after_forward:
                call()
        return output

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # Libraries look for private attributes to recognise kinds of models.
            if name.startswith("_") or not self.__dict__.get("_is_wrapped"):
                raise
        value = getattr(self.module, name)
        if isinstance(value, torch.nn.Module):
            raise AttributeError(
                f"{name!r} is a part of the model that DDP wraps: use model.module.{name}. To "
                "train, call model(…): gradients of parts that are called directly aren't "
                "averaged over the workers."
            )
        if ismethod(value) and isinstance(value.__self__, torch.nn.Module):
            return self._without_training(value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        if self._is_of_model(name):
            setattr(self.module, name, value)
        else:
            super().__setattr__(name, value)

    def _is_of_model(self, name: str) -> bool:
        is_own = name in self.__dict__ or hasattr(type(self), name) or name.startswith("_")
        return (
            not is_own
            and bool(self.__dict__.get("_is_wrapped"))
            and name not in self._modules
            and hasattr(self.module, name)
        )

    def _without_training(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a method so that it raises an error if it runs the model with gradients."""
        parts = frozenset(self.module.modules())

        def refuse(part: torch.nn.Module, _: Any) -> None:
            if part in parts and part.training and torch.is_grad_enabled():
                raise RuntimeError(
                    f"{method.__name__}() runs the model with gradients, which DDP doesn't average "
                    f"over the workers. Call {method.__name__}() in the model's forward, and "
                    "train with model(…); or call it under torch.no_grad()."
                )

        @functools.wraps(method)
        def called(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return method(*args, **kwargs)
            with register_module_forward_pre_hook(refuse):
                return method(*args, **kwargs)

        return called


class NodeDataParallel(DataParallel):
    """DDP over a `gradient_group` in place of the default group."""

    @property
    def join_process_group(self) -> Any:
        """The default group: all objects in one `Join` must have the same group."""
        return dist.group.WORLD

    def _check_default_group(self) -> None:
        """Allow copies and pickles, which use the default group."""


def unwrapped(part: Any) -> Any:
    """Return the module inside DDP and `torch.compile` wrappers; any other value as it is."""
    if isinstance(part, DistributedDataParallel):
        return unwrapped(part.module)
    inside = uncompiled(part) if isinstance(part, torch.nn.Module) else part
    return part if inside is part else unwrapped(inside)


def own_class(module: torch.nn.Module) -> type[Any]:
    """Return a module's class, without the one that FSDP2 has made of it."""
    kind = type(module)
    return kind.__bases__[-1] if isinstance(module, FSDPModule) else kind
