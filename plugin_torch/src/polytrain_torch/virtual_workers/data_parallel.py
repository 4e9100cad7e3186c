"""A model that is trained by virtual workers: checks, and a DDP class that leaves sums to them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.nn import SyncBatchNorm

from polytrain_torch.collectives.node_group import NodeGroup, gradient_group
from polytrain_torch.models.parallel import NodeDataParallel
from polytrain_torch.randomness import generators_of, share_function_seed
from polytrain_torch.virtual_workers import VirtualWorkers

_NOT_DDPS = ("process_group", "device_mesh")
"""Arguments of DDP that would have others average the gradients."""


class VirtualDataParallel(NodeDataParallel):
    """DDP whose gradients are averaged at the end of the loop over micro-batches."""

    is_virtual = True

    def __init__(self, model: torch.nn.Module, virtual: VirtualWorkers, **arguments: Any) -> None:
        super().__init__(model, **arguments)
        self._virtual = virtual
        self.require_backward_grad_sync = self.require_forward_param_sync = False
        group = self.process_group
        shares = isinstance(group, NodeGroup) and group.shares_memory
        virtual.add_model(self.module, group if shares else None)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and (self.training or self._virtual.is_in_loop):
            self._begin(inputs, kwargs)
        return super().forward(*inputs, **kwargs)

    @torch.compiler.disable
    def _begin(self, inputs: Any, kwargs: Any) -> None:
        if not self._virtual.is_in_loop:
            raise RuntimeError(
                "With ScalingConfig(virtual_workers=…), a prepared model is trained in a loop over "
                "the batch's micro-batches: `for x, y in micro_batches(batch):` with forward and "
                "backward in it, and the optimizer's step after it. Only batches of a data set "
                "that is split, or of a prepared data loader, have micro-batches. To evaluate, "
                "call model.eval() or use torch.no_grad()."
            )
        self._virtual.called(self.module, inputs, kwargs)


def in_virtual_workers(
    model: torch.nn.Module,
    virtual: VirtualWorkers,
    device: torch.device,
    arguments: Mapping[str, Any],
) -> VirtualDataParallel:
    """Return a model on its device, to be trained by virtual workers, with the user's arguments.

    Raises:
        ValueError: it has parts whose results depend on the number of ranks, or on what happened
            before.
    """
    if problems := [*_problems(model, arguments)]:
        raise ValueError(
            "The model can't be the same at any number of workers, as virtual_workers promises:\n- "
            + "\n- ".join(problems)
        )
    virtual.compare_ranks()
    share_function_seed()
    kept = {
        **arguments,
        # Virtual workers do what these are for.
        "find_unused_parameters": False,
        "gradient_as_bucket_view": False,
        "static_graph": False,
    }
    return VirtualDataParallel(model, virtual, process_group=gradient_group(device), **kept)


def _problems(model: torch.nn.Module, arguments: Mapping[str, Any]) -> Iterator[str]:
    for name in arguments.keys() & set(_NOT_DDPS):
        yield f"{name} has other ranks average the gradients. Leave it out."
    for name, part in model.named_modules():
        what = f"{name!r}" if name else "the model"
        if isinstance(part, SyncBatchNorm):
            yield (
                f"{what} is a SyncBatchNorm, which averages over the ranks' batches. Use "
                "BatchNorm: its statistics are each micro-batch's, and its buffers virtual "
                "worker 0's."
            )
        if generators_of(part):
            yield (
                f"{what} draws random numbers from a generator of its own, which continues from "
                "wherever it is. Draw them from torch's default generator, which is seeded for "
                "each micro-batch."
            )
