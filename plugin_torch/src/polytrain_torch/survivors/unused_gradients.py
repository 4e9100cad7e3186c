"""Finds gradients that no optimizer's step has used yet: no checkpoint has them.

A loop may fetch its next batch between `backward()` and the step, or an optimizer may step once for
several batches while another one steps for each. A restart from there would leave out what these
batches have computed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TypeAlias

import torch

from polytrain_torch.private import version_of
from polytrain_torch.survivors.live_parts import local_part

LACKS_GRADIENTS = (
    "A report comes between backward() and the optimizer's step: its checkpoint doesn't have the "
    "gradients so far, and a restart from it loses them. Report after the step, once for all "
    "batches whose gradients it adds up."
)

_Look: TypeAlias = tuple[weakref.ref[torch.Tensor], int]
"""A gradient, which nobody holds for this, and the number of writes to it."""


class UnusedGradients:
    """Knows whether gradients wait for the next step of an optimizer of the state."""

    def __init__(
        self,
        optimizers: Collection[torch.optim.Optimizer],
        *,
        are_held: Callable[[], bool] = lambda: False,
    ) -> None:
        """
        Args:
            optimizers: those of the state.
            are_held: returns whether there are gradients that no parameter has yet.
        """
        self._optimizers = optimizers
        self._are_held = are_held
        self.passes = 0
        """Number of backward passes."""

        self._are_computed = False
        """Whether there was one since the last step."""

        self._used: tuple[torch.nn.Parameter, _Look] | None = None
        """One of the parameters, with the gradient of it that the last step has used."""

        self._left: Mapping[int, _Look] = {}
        """By the parameters' ids, the used gradients that the next backward pass has met."""

        self._stepped: set[torch.optim.Optimizer] = set()
        """Those that have stepped since the last clean point."""

        self._seen: dict[int, _Look] = {}
        """If there are several: the gradients at the clean point after each one's last step."""

        self._not_reset: list[torch.nn.Parameter] = []
        """Those whose gradients at the last open point weren't seen to be reset since."""

    def computed(self) -> None:
        """Note that a backward pass begins."""
        self.passes += 1
        self._not_reset = _with_gradients(self._not_reset)
        if self._are_computed:
            return
        self._are_computed = True
        # Loops that set gradients to zero before it have nothing to look at.
        are_left = self._used is not None and _is_still(self._used[0].grad, self._used[1])
        self._left = _looks(self._optimizers) if are_left else {}

    def used_by(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the end of an optimizer's step."""
        self._are_computed = False
        self._stepped.add(optimizer)
        self._used = None
        for each in _parameters(optimizer):
            if (gradient := each.grad) is not None:
                self._used = each, _look(gradient)
                break

    def passed(self) -> None:
        """Note a clean point."""
        if len(self._optimizers) > 1:
            self._seen |= _looks(self._stepped)
        self._stepped.clear()

    def dropped_later(self) -> Callable[[], bool]:
        """Return a function that tells, later, whether nobody has the gradients of now any more.

        A sum in place of a gradient still has it: a parameter must have been without one.
        """
        looks = [*_looks(self._optimizers).values()]
        parameters = (each for optimizer in self._optimizers for each in _parameters(optimizer))
        self._not_reset = _with_gradients(parameters)
        return lambda: (
            not self._are_held()
            and not _with_gradients(self._not_reset)
            and all(gradient() is None for gradient, _ in looks)
        )

    def exist(self, *, reads_values: bool = True) -> bool:
        """Return whether gradients wait for a step.

        Those that a step has used stay until they are set to zero. A parameter whose optimizer has
        stepped isn't looked at if another one has stepped since: the loss of a generator, for
        example, leaves gradients in the discriminator, which the next step doesn't use.

        Args:
            reads_values: whether to leave out infinite gradients, which no step uses: a
                `GradScaler` has left it out. This waits for a GPU.
        """
        return self._are_held() or any(
            gradients and (not reads_values or all(map(_is_finite, gradients)))
            for gradients in self._new()
        )

    def _new(self) -> Iterator[list[torch.Tensor]]:
        """Yield each optimizer's new gradients."""
        if self._are_computed:
            for each in self._optimizers:
                yield _new_ones(_parameters(each), self._left)
        if len(self._optimizers) > 1:
            used = {id(each) for optimizer in self._stepped for each in _parameters(optimizer)}
            for each in self._optimizers:
                waiting = (one for one in _parameters(each) if id(one) not in used)
                yield _new_ones(waiting, self._seen)


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.nn.Parameter]:
    return (each for group in optimizer.param_groups for each in group["params"])


def _with_gradients(parameters: Iterable[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    return [each for each in parameters if each.grad is not None]


def _looks(optimizers: Iterable[torch.optim.Optimizer]) -> Mapping[int, _Look]:
    """Return looks at the optimizers' gradients, by the parameters' ids."""
    return {
        id(parameter): _look(parameter.grad)
        for each in optimizers
        for parameter in _parameters(each)
        if parameter.grad is not None
    }


def _new_ones(
    parameters: Iterable[torch.nn.Parameter], seen: Mapping[int, _Look]
) -> list[torch.Tensor]:
    """Return the parameters' gradients that aren't what was seen of them."""
    return [
        each.grad
        for each in parameters
        if each.grad is not None and not _is_still(each.grad, seen.get(id(each)))
    ]


def _look(gradient: torch.Tensor) -> _Look:
    # What adds to a shard's gradient doesn't count as a write to the whole.
    return weakref.ref(gradient), version_of(local_part(gradient))


def _is_still(gradient: torch.Tensor | None, seen: _Look | None) -> bool:
    if gradient is None or seen is None:
        return False
    return seen[0]() is gradient and seen[1] == version_of(local_part(gradient))


def _is_finite(gradient: torch.Tensor) -> bool:
    own = local_part(gradient)
    return bool(torch.isfinite(own.coalesce().values() if own.is_sparse else own).all())
