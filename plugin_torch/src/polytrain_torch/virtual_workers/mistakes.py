"""Finds what happens in the loop over micro-batches and makes a result depend on the ranks.

A loss that reads the number of ranks, or sums over them, is another one at another number of
workers. A scheduler that steps in the loop, or averaged weights that are updated there, change once
for each virtual worker of the rank.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel

from polytrain import Context
from polytrain_torch.checkpoints.rank_parts import digest
from polytrain_torch.models.parallel import unwrapped
from polytrain_torch.private import tree_leaves
from polytrain_torch.virtual_workers.arithmetic import warn_inexact

_DEPENDS_ON_RANKS = (
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce"),
    *("get_world_size", "reduce", "reduce_scatter", "reduce_scatter_tensor"),
)

_OF_CONTEXT = ((Context, "get_world_size"), (Context, "get_local_world_size"))

_LIBRARIES = {"polytrain", "polytrain_torch", "torch"}


@contextmanager
def watched_ranks(report: Callable[[str], None]) -> Iterator[None]:
    """Report each call in a block of code whose result depends on the number of ranks.

    `report` gets the name of the function, with that of its module or class. Calls by torch and
    polytrain are left out, and so are functions that a module has imported by name.
    """

    def watched(owner: Any, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def calls(*args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                caller = sys._getframe(1).f_globals.get("__name__", "")
                if caller.partition(".")[0] not in _LIBRARIES:
                    report(f"{owner.__name__}.{name}")
            return function(*args, **kwargs)

        return calls

    names = [*((dist, name) for name in _DEPENDS_ON_RANKS), *_OF_CONTEXT]
    originals = [(owner, name, getattr(owner, name)) for owner, name in names]
    for owner, name, function in originals:
        setattr(owner, name, watched(owner, name, function))
    try:
        yield
    finally:
        for owner, name, function in originals:
            setattr(owner, name, function)


@contextmanager
def checked_averages(is_in_loop: Callable[[], bool]) -> Iterator[None]:
    """Refuse updates of `AveragedModel`s within a loop that trains, in a block of code."""
    original: Any = AveragedModel.update_parameters

    @functools.wraps(original)
    def checked(*args: Any, **kwargs: Any) -> None:
        if is_in_loop():
            raise RuntimeError(
                "Averaged weights are updated within the loop over micro_batches(…), whose length "
                "depends on the number of workers, and in which the weights stay the same. Call "
                "update_parameters after the loop, after the optimizer's step."
            )
        original(*args, **kwargs)

    AveragedModel.update_parameters = checked
    try:
        yield
    finally:
        AveragedModel.update_parameters = original


class LoopLosses:
    """The losses whose `backward` the last loop has called on this rank, without their graphs."""

    def __init__(self) -> None:
        self._losses: list[torch.Tensor] = []

    def begin(self) -> None:
        """Begin a loop that trains."""
        self._losses = []

    def add(self, loss: torch.Tensor) -> None:
        """Take the loss of a micro-batch."""
        if loss.numel() == 1:
            # A user may add the next ones to it.
            self._losses.append(loss.detach().clone())

    def hold(self, metric: Any) -> bool:
        """Return whether a metric is the loss of one micro-batch, and another one's differs."""
        values = [loss.item() for loss in self._losses]
        return len(set(values)) > 1 and float(metric) in values


@contextmanager
def watched_plateaus(losses: LoopLosses, is_in_loop: Callable[[], bool]) -> Iterator[None]:
    """Warn, once, if `ReduceLROnPlateau` steps by one micro-batch's loss, in a block of code.

    `losses` takes those of each loop that trains.
    """
    backward: Any = torch.Tensor.backward
    step: Any = ReduceLROnPlateau.step
    was_seen = False

    @functools.wraps(backward)
    def noted(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        if not torch.compiler.is_compiling() and is_in_loop():
            losses.add(self)
        backward(self, *args, **kwargs)

    @functools.wraps(step)
    def checked(self: ReduceLROnPlateau, metrics: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal was_seen
        if not was_seen and losses.hold(metrics):
            was_seen = True
            warn_inexact(
                "ReduceLROnPlateau.step gets the loss of one micro-batch, and which one depends on "
                "the number of workers: pass the mean over the global batch, or a metric of "
                "validation that all ranks agree on"
            )
        step(self, metrics, *args, **kwargs)

    torch.Tensor.backward = noted
    ReduceLROnPlateau.step = checked
    try:
        yield
    finally:
        torch.Tensor.backward = backward
        ReduceLROnPlateau.step = step


class UnchangedParts:
    """The parts of a training state that the loop must not change.

    Models that virtual workers train, optimizers and metrics are left out. Averages that begin with
    the model's weights don't change before its first step, so states are compared in loops 1, 2, 4,
    8 and so on.
    """

    def __init__(self) -> None:
        self._parts: dict[str, Any] = {}
        self._loops = 0
        self._before: dict[str, list[bytes]] = {}

    def add(self, parts: Mapping[str, Any]) -> None:
        """Compare these too."""
        kept = {name: unwrapped(part) for name, part in parts.items()}
        self._parts |= {name: part for name, part in kept.items() if not _may_change(part)}

    def begin(self, models: Iterable[torch.nn.Module]) -> None:
        """Begin a loop in which virtual workers train these models."""
        self._loops += 1
        self._before = {} if self._loops & (self._loops - 1) else self._digests(models)

    def end(self, models: Iterable[torch.nn.Module]) -> None:
        """Warn, once each, of the parts that have changed in a loop."""
        after = self._digests(models) if self._before else {}
        for name, its in self._before.items():
            if after.get(name, its) != its:
                del self._parts[name]
                warn_inexact(
                    f"{name!r} of TrainingState changes in the loop over micro_batches(…), whose "
                    "length depends on the number of workers: change it after the loop"
                )

    def _digests(self, models: Iterable[torch.nn.Module]) -> dict[str, list[bytes]]:
        trained = {each for model in models for each in model.modules()}
        # A part may hold a model in another way.
        buffers = {each.data_ptr() for module in trained for each in module.buffers(recurse=False)}
        return {
            name: [
                digest(leaf)
                for leaf in tree_leaves(part.state_dict())
                if not isinstance(leaf, torch.Tensor) or leaf.data_ptr() not in buffers
            ]
            for name, part in self._parts.items()
            if not isinstance(part, torch.nn.Module) or trained.isdisjoint(part.modules())
        }


def _may_change(part: Any) -> bool:
    """Whether the loop may change a part: a metric, or what joins all ranks' states itself."""
    is_metric = isinstance(part, torch.nn.Module) and callable(getattr(part, "persistent", None))
    return is_metric or isinstance(part, torch.optim.Optimizer) or hasattr(part, "load_state_dicts")


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
