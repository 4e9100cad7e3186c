"""Proves at the start of an attempt that all ranks compute the same bits.

At the end of a loop over micro-batches all ranks run each model that has been called forward and
backward, with the input and the random numbers of rank 0's first call, and compare digests of the
gradients.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from polytrain.extension import record_exactness
from polytrain_torch.checkpoints.rank_parts import digest
from polytrain_torch.collectives.gathering import from_rank_0, gathered
from polytrain_torch.moving import moved
from polytrain_torch.private import tree_leaves
from polytrain_torch.randomness import seed_place
from polytrain_torch.virtual_workers.arithmetic import warn_inexact
from polytrain_torch.virtual_workers.buffers import Buffers

logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")


class Proofs:
    """What has been proven of each model. All ranks add the same models, and end the same loops."""

    def __init__(self) -> None:
        self._models: list[torch.nn.Module] = []
        self._settled: set[int] = set()
        """Numbers of the models that have been compared, or that can't be."""

        self._calls: dict[int, _FirstCall] = {}
        self._loops = 0
        """Number of loops since the last model was added."""

    def add(self, model: torch.nn.Module) -> None:
        """Prove this model too."""
        self._models.append(model)
        self._loops = 0

    def called(self, model: torch.nn.Module, inputs: Any, kwargs: Any) -> None:
        """Keep the input of a model's first call until the ranks have been compared."""
        if len(self._settled) < len(self._models):
            number = next(n for n, each in enumerate(self._models) if each is model)
            if number not in self._settled and number not in self._calls:
                self._calls[number] = _FirstCall(model, inputs, kwargs)

    def end_loop(self) -> None:
        """Compare the gradients of models that have been called since the last comparison.

        All ranks call this, and seed their generators after it.

        Raises:
            RuntimeError: a rank has others than rank 0.
        """
        self._loops += 1
        # Only rank 0 knows what it has called. A model that isn't trained mustn't cost a message
        # in each step, so it is asked after loops 1, 2, 4, 8, …
        if len(self._settled) == len(self._models) or self._loops & (self._loops - 1):
            return
        is_first = dist.get_rank() == 0
        sent: dict[int, Any] = from_rank_0(self._sendable() if is_first else None)
        self._calls.clear()
        self._settled.update(sent)
        calls = {n: call for n, call in sent.items() if call is not None}
        if not calls:
            return
        found = {n: _gradients(self._models[n], *call) for n, call in calls.items()}
        by_rank = gathered(found)
        others = [rank for rank, theirs in enumerate(by_rank) if theirs != by_rank[0]]
        if others:
            record_exactness(f"rank {others[0]} has computed other gradients than rank 0")
            raise RuntimeError(
                f"Rank {others[0]} computes other gradients than rank 0 from the same "
                "micro-batch, weights and random numbers, so the run can't be the same at any "
                "number of workers. Give all workers the same type of CPU or GPU and the same "
                "versions of libraries; a model must not draw random numbers from outside torch, "
                "NumPy and Python, nor keep state from call to call that isn't a buffer."
            )
        for number, digest_of_all in found.items() if is_first else ():
            if digest_of_all is None:
                self._warn(
                    number,
                    "no tensor with a gradient was found in its output (tensors, or dicts, lists "
                    "or tuples of them)",
                )
            else:
                logger.info(
                    "Exact over world sizes: yes for %s; all ranks have computed the same "
                    "gradients.",
                    self._name(number),
                )
                record_exactness("")

    def end_attempt(self) -> None:
        """Warn of models that haven't been compared."""
        if not self._loops:
            return
        for number, model in enumerate(self._models):
            is_trained = any(each.grad is not None for each in model.parameters())
            if number not in self._settled and (is_trained or number in self._calls):
                self._warn(number, "it was trained only in the last loops over micro_batches(…)")

    def _sendable(self) -> dict[int, Any]:
        """Return the calls by model; None in place of one that can't be sent."""
        return {number: self._sendable_call(number, call) for number, call in self._calls.items()}

    def _sendable_call(self, number: int, call: _FirstCall) -> Any:
        sent = moved(call.arguments, _CPU), call.precision
        try:
            pickle.dumps(sent)
        except (pickle.PicklingError, AttributeError, TypeError, RuntimeError) as error:
            self._warn(number, f"its input can't be sent to other ranks: {error}")
            return None
        return sent

    def _name(self, number: int) -> str:
        return f"model {number + 1} ({type(self._models[number]).__qualname__})"

    def _warn(self, number: int, why: str) -> None:
        warn_inexact(f"not proven for {self._name(number)}, as {why}")


class _FirstCall:
    """The input of a model's first call, and its precision."""

    def __init__(
        self, model: torch.nn.Module, inputs: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        self.arguments = inputs, kwargs
        kind = _device_of(model).type
        self.precision = (
            kind,
            torch.get_autocast_dtype(kind),
            torch.is_autocast_enabled(kind),
        )


def _device_of(model: torch.nn.Module) -> torch.device:
    return next(model.parameters()).device


def _gradients(model: torch.nn.Module, arguments: Any, precision: Any) -> bytes | None:
    """Return a digest of the gradients, and leave the model as it was; None without gradients."""
    kind, dtype, is_enabled = precision
    parameters = [each for each in model.parameters() if each.requires_grad]
    earlier = [each.grad for each in parameters]
    buffers = Buffers([model])
    for each in parameters:
        each.grad = None
    seed_place("proof")
    inputs, kwargs = moved(arguments, _device_of(model))
    with torch.autocast(kind, dtype=dtype, enabled=is_enabled):
        outputs = tree_leaves(model(*inputs, **kwargs))
    trained = [each for each in outputs if isinstance(each, torch.Tensor) and each.requires_grad]
    if trained:
        torch.stack([each.abs().float().sum() for each in trained]).sum().backward()
    found = [each.grad for each in parameters]
    for each, gradient in zip(parameters, earlier, strict=True):
        each.grad = gradient
    buffers.reset()
    return digest(found) if any(each is not None for each in found) else None
