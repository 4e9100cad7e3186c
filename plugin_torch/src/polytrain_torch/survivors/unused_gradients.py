"""Finds gradients that no optimizer's step has used yet: no checkpoint has them.

A loop may fetch its next batch between `backward()` and the step, or an optimizer may step once for
several batches while another one steps for each. A restart from there would leave out what these
batches have computed.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Sequence
from itertools import chain, repeat
from typing import TypeAlias

import torch
from torch.distributed.tensor import DTensor

from polytrain_torch.private import version_of

_Seen: TypeAlias = Sequence[tuple[weakref.ref[torch.Tensor], int] | None]
"""Of each parameter its gradient, which nobody holds for this, and the number of writes to it."""


class UnusedGradients:
    """Knows whether gradients wait for the next step of an optimizer of the state."""

    def __init__(self, optimizers: Collection[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self.passes = 0
        """Number of backward passes."""

        self._are_computed = False
        """Whether there was one since the last step."""

        self._stepped: set[torch.optim.Optimizer] = set()
        """Those that have stepped since the last clean point."""

        self._seen: dict[torch.optim.Optimizer, _Seen] = {}
        """The gradients at the clean point after each one's last step, if there are several."""

    def computed(self) -> None:
        """Note a backward pass."""
        self.passes += 1
        self._are_computed = True

    def used_by(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the end of an optimizer's step."""
        self._are_computed = False
        self._stepped.add(optimizer)

    def passed(self) -> None:
        """Note a clean point."""
        if len(self._optimizers) > 1:
            self._seen |= {each: [*map(_look, _gradients(each))] for each in self._stepped}
        self._stepped.clear()

    def exist(self) -> bool:
        """Return whether there are some.

        Those that a step has used stay until they are set to zero. An optimizer that has stepped
        isn't looked at if another one has stepped since: the loss of a generator, for example,
        leaves gradients in the discriminator, which the next step doesn't use. Nor does any step
        use those that are infinite: a `GradScaler` has left it out.
        """
        if self._are_computed:
            every = [each for optimizer in self._optimizers for each in _gradients(optimizer)]
            computed = [each for each in every if each is not None]
            if computed and all(map(_is_finite, computed)):
                return True
        waiting = (each for each in self._optimizers if each not in self._stepped)
        return len(self._optimizers) > 1 and any(map(self._has_new, waiting))

    def _has_new(self, optimizer: torch.optim.Optimizer) -> bool:
        # Groups that were added since come last.
        seen = chain(self._seen.get(optimizer, ()), repeat(None))
        return any(
            now is not None and (then is None or then[0]() is not now or then[1] != version_of(now))
            for now, then in zip(_gradients(optimizer), seen, strict=False)
        )


def _gradients(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor | None]:
    return (each.grad for group in optimizer.param_groups for each in group["params"])


def _is_finite(gradient: torch.Tensor) -> bool:
    own = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return bool(torch.isfinite(own.coalesce().values() if own.is_sparse else own).all())


def _look(gradient: torch.Tensor | None) -> tuple[weakref.ref[torch.Tensor], int] | None:
    return None if gradient is None else (weakref.ref(gradient), version_of(gradient))
