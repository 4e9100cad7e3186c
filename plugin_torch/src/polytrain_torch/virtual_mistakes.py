"""Finds what happens in the loop over micro-batches and makes a result depend on the ranks.

A loss that reads the number of ranks, or sums over them, is another one at another number of
workers. A scheduler that steps in the loop steps once for each virtual worker of the rank.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist

_DEPENDS_ON_RANKS = (
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce"),
    *("get_world_size", "reduce", "reduce_scatter", "reduce_scatter_tensor"),
)

_LIBRARIES = {"polytrain", "polytrain_torch", "torch"}


@contextmanager
def watched_ranks(report: Callable[[str], None]) -> Iterator[None]:
    """Report each call in a block of code whose result depends on the number of ranks.

    Calls by torch and polytrain are left out, and so are functions that a module has imported by
    name.

    Args:
        report: gets the function's name.
    """

    def watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def calls(*args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                caller = sys._getframe(1).f_globals.get("__name__", "")
                if caller.partition(".")[0] not in _LIBRARIES:
                    report(name)
            return function(*args, **kwargs)

        return calls

    originals = {name: getattr(dist, name) for name in _DEPENDS_ON_RANKS}
    for name, function in originals.items():
        setattr(dist, name, watched(name, function))
    try:
        yield
    finally:
        for name, function in originals.items():
            setattr(dist, name, function)


class LearningRates:
    """The learning rates of the optimizers that have stepped, from micro-batch to micro-batch."""

    def __init__(self) -> None:
        self._optimizers: WeakSet[torch.optim.Optimizer] = WeakSet()
        self._compared: list[torch.optim.Optimizer] = []
        """Those of a loop. None of them can be collected within it."""

        self._seen: list[float] | None = None

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at this optimizer from now on."""
        self._optimizers.add(optimizer)

    def begin(self) -> None:
        """Begin a loop."""
        self._compared, self._seen = list(self._optimizers), None

    def end(self) -> None:
        """End a loop."""
        self._compared = []

    def end_micro_batch(self) -> None:
        """Compare with the micro-batch before.

        Raises:
            RuntimeError: they have changed.
        """
        groups = (group for each in self._compared for group in each.param_groups)
        now = [float(group.get("lr", 0)) for group in groups]
        if self._seen is not None and now != self._seen:
            raise RuntimeError(
                "The learning rate changes within the loop over micro_batches(…), whose length "
                "depends on the number of workers. Step schedulers after the loop."
            )
        self._seen = now
