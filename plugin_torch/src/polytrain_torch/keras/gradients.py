"""Averages the gradients of Keras models on torch over all ranks."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.weak import WeakTensorKeyDictionary

from polytrain_torch.collectives.gathering import gathered
from polytrain_torch.collectives.node_group import gradient_group
from polytrain_torch.private import after_backward, backward_pass


class AveragedGradients:
    """Averages the gradients of a model's parameters at the end of each backward pass.

    It can't begin earlier, because a rank may skip layers in a step, as with stochastic depth. As
    in DDP, a parameter that only some ranks used counts as 0 on the others, and one that no rank
    used gets no gradient.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._parameters: list[torch.Tensor] = []
        self._indices = WeakTensorKeyDictionary()
        self._hooked = WeakTensorKeyDictionary()
        self._used: set[int] = set()
        self._backward_pass: int | None = None

    def renew(self) -> None:
        """Use the parameters that the model has now. All ranks call this.

        Raises:
            ValueError: the ranks' parameters have different shapes.
        """
        if dist.get_world_size() == 1:
            return
        named = [each for each in parameters_in_order(self._model) if each[1].is_floating_point()]
        _check_same([(name, tuple(parameter.shape)) for name, parameter in named])
        self._parameters = [parameter for _, parameter in named]
        self._indices = WeakTensorKeyDictionary()
        for index, parameter in enumerate(self._parameters):
            self._indices[parameter] = index
            if parameter in self._hooked:
                continue
            # A frozen parameter may be trained later, but torch refuses a hook while it is frozen.
            is_trained = parameter.requires_grad
            parameter.requires_grad_(True)
            parameter.register_post_accumulate_grad_hook(self._use)
            parameter.requires_grad_(is_trained)
            self._hooked[parameter] = True

    def _use(self, parameter: torch.Tensor) -> None:
        index = self._indices.get(parameter)
        if index is None:
            return
        this_pass = backward_pass()
        if this_pass != self._backward_pass:
            self._backward_pass = this_pass
            self._used.clear()
            after_backward(self._average)
        self._used.add(index)

    @torch.no_grad()
    def _average(self) -> None:
        device = self._parameters[0].device
        ranks = torch.zeros(len(self._parameters), device=device)
        ranks[list(self._used)] = 1
        dist.all_reduce(ranks, group=gradient_group(device))
        for parameter, number in zip(self._parameters, ranks.tolist(), strict=True):
            if not number:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=gradient_group(parameter.device))
            parameter.grad /= dist.get_world_size()


def parameters_in_order(model: Any) -> list[tuple[str, torch.Tensor]]:
    """Return a model's parameters with their names, in the order of their creation.

    torch orders them by name, and names differ by rank: Keras numbers layers over all models of a
    process.
    """
    named = [(variable.path, variable.value) for variable in model.variables]
    known = {id(parameter) for _, parameter in named}
    return named + [each for each in model.named_parameters() if id(each[1]) not in known]


def _check_same(mine: list[tuple[str, tuple[int, ...]]]) -> None:
    """Check that all ranks' parameters have the same shapes. Names may differ.

    Raises:
        ValueError: the shapes differ.
    """
    first, *others = gathered(mine)
    for rank, its in enumerate(others, start=1):
        for of_first, of_other in zip_longest(first, its, fillvalue=("nothing", ())):
            if of_first[1] != of_other[1]:
                raise ValueError(
                    f"The ranks have different models: where rank 0 has {_named(of_first)}, rank "
                    f"{rank} has {_named(of_other)}. Build the same model on every rank."
                )


def _named(parameter: tuple[str, tuple[int, ...]]) -> str:
    name, shape = parameter
    return f"{name} of shape {shape}"
