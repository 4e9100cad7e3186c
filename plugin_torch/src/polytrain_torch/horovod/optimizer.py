"""`DistributedOptimizer`: a torch optimizer whose step uses the gradients of all ranks."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from polytrain_torch.horovod.basics import size
from polytrain_torch.horovod.gradients import GradientReducer
from polytrain_torch.horovod.reductions import (
    Average,
    Compression,
    Compressor,
    refuse_process_set,
    torch_op,
)
from polytrain_torch.survivors.points import averaging_optimizers


class _Distributed(torch.optim.Optimizer):
    """Adds the reduction of gradients to an optimizer class."""

    # Class attributes, so that a copy of the optimizer trains by itself.
    _reducer: GradientReducer | None = None
    _skips = False
    _is_synchronized = False

    def synchronize(self) -> None:
        """Wait until the gradients are reduced over all ranks; `step` does so by itself."""
        if self._reducer is not None:
            self._reducer.synchronize()
        self._is_synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Have `step` use the gradients as they are, after a call of `synchronize`."""
        self._skips = True
        try:
            yield
        finally:
            self._skips = False

    def step(self, closure: Any = None) -> Any:
        """Update the parameters with the gradients of all ranks."""
        if not self._skips:
            if self._is_synchronized:
                warnings.warn(
                    "optimizer.step() reduces the gradients a second time after "
                    "optimizer.synchronize(). Call it within optimizer.skip_synchronize().",
                    stacklevel=2,
                )
            self.synchronize()
        self._is_synchronized = False
        return super().step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients.

        Raises:
            AssertionError: they are being reduced.
        """
        if self._reducer is not None and self._reducer.is_under_way:
            raise AssertionError(
                "optimizer.zero_grad() comes after loss.backward() and before optimizer.step() or "
                "optimizer.synchronize(), while gradients are being reduced. Call it before "
                "backward(), or after step()."
            )
        super().zero_grad(set_to_none)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Accumulate the gradients of this many backward passes from now on."""
        _check_passes(passes)
        if self._reducer is not None:
            self._reducer.passes = passes
            self._reducer.reset()

    def load_state_dict(self, state_dict: Any) -> None:
        """Load an optimizer's state, and forget gradients that are being reduced."""
        if self._reducer is not None:
            self._reducer.reset()
        self._skips = self._is_synchronized = False
        groups = self.param_groups
        super().load_state_dict(state_dict)
        # A scheduler of the optimizer that this one wraps changes these.
        for kept, loaded in zip(groups, self.param_groups, strict=True):
            kept.clear()
            kept.update(loaded)
        self.param_groups[:] = groups


# The step of the optimizer's own class runs torch's step hooks: keep torch from wrapping this one.
_Distributed.step.hooked = True  # type: ignore[attr-defined]


def DistributedOptimizer(  # Horovod's name
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: Any = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: None = None,
) -> Any:
    """Return an optimizer that averages gradients over all ranks before each step.

    All ranks call this. Gradients are reduced while the backward pass runs. A parameter without a
    gradient on a rank counts there as zero.

    Args:
        optimizer: an optimizer of any class; its state and options are kept.
        named_parameters: `model.named_parameters()`: all of the optimizer's, with unique names.
        compression: a member of `Compression`, for the gradients.
        backward_passes_per_step: number of backward passes over which gradients are accumulated
            before they are reduced. The sum isn't divided by it.
        op: `Average`, `Sum`, `Min`, `Max` or `Product`.
        gradient_predivide_factor: with `Average`, gradients are divided by this before they are
            summed, and by (number of ranks / this) afterwards.
        num_groups: no effect; gradients are grouped by size.
        groups: no effect.
        sparse_as_dense: no effect; sparse gradients are always reduced as dense ones, and made
            sparse again for the step.
        process_set: refused; leave it out.

    Raises:
        ValueError: an argument is wrong.
        NotImplementedError: `op` is `Adasum`.
    """
    refuse_process_set(process_set)
    torch_op(op)
    _check_passes(backward_passes_per_step)
    if gradient_predivide_factor != 1.0 and op is not Average:
        raise ValueError(
            f"gradient_predivide_factor={gradient_predivide_factor!r}: it divides an average. Use "
            "op=hvd.Average, or leave it out"
        )
    if named_parameters is not None:
        _check_names(optimizer, [*named_parameters])
    kind = type(optimizer)
    made = type(kind.__name__, (_Distributed, kind), {})
    distributed: Any = object.__new__(made)
    # A scheduler may have replaced the instance's `step`.
    distributed.__dict__.update({k: v for k, v in vars(optimizer).items() if k != "step"})
    if size() > 1:
        distributed._reducer = GradientReducer(
            parameters=[
                parameter
                for group in optimizer.param_groups
                for parameter in group["params"]
                if parameter.requires_grad
            ],
            passes=backward_passes_per_step,
            op=op,
            predivide=gradient_predivide_factor,
            compression=compression,
        )
        averaging_optimizers.add(distributed)
    return distributed


def _check_passes(passes: int) -> None:
    if not passes > 0:
        raise ValueError(f"backward_passes_per_step={passes!r}: give 1 or more")


def _check_names(optimizer: torch.optim.Optimizer, named: list[Any]) -> None:
    if not all(isinstance(each, tuple) and len(each) == 2 for each in named):
        raise ValueError(
            "named_parameters: it isn't pairs of name and parameter. Pass model.named_parameters()"
        )
    twice = [name for name, times in Counter(name for name, _ in named).items() if times > 1]
    if twice:
        raise ValueError(
            f"named_parameters: several parameters are named {', '.join(map(repr, twice))}. With "
            "several models, give each a prefix: model.named_parameters(prefix='…')"
        )
    known = {id(parameter) for _, parameter in named}
    unnamed = [
        [*parameter.shape]
        for group in optimizer.param_groups
        for parameter in group["params"]
        if id(parameter) not in known
    ]
    if unnamed:
        raise ValueError(
            f"named_parameters: the optimizer has {len(unnamed)} more, of the shapes "
            f"{', '.join(map(str, unnamed[:5]))}. Pass the named parameters of all its models"
        )
