"""All-reduces the gradients of parameters while the backward pass runs.

Gradients are packed into buckets, which all ranks reduce in the same order: a bucket is reduced
when its gradients and those of all earlier buckets are ready. A parameter without a gradient
counts as zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from polytrain_torch.collectives.buckets import buckets
from polytrain_torch.collectives.node_group import gradient_group
from polytrain_torch.devices import current_device
from polytrain_torch.horovod.call_log import completed, log_call
from polytrain_torch.horovod.reductions import Average, Compressor, on_group_device, scale, torch_op
from polytrain_torch.private import version_of
from polytrain_torch.row_weights import weighted_gradient
from polytrain_torch.survivors.points import before_average

_BUCKET = 25 << 20
"""Minimum bytes of a bucket, except the last of each dtype and device."""


@dataclass(kw_only=True, eq=False)
class _Bucket:
    parameters: Sequence[torch.nn.Parameter]
    missing: int = 0
    """Number of parameters whose gradients aren't ready yet."""

    packed: Sequence[tuple[torch.Tensor | None, int]] = ()
    """The gradients that were packed, and the numbers of their writes so far."""

    sent: torch.Tensor | None = None
    compressed_as: Any = None
    work: Any = None

    @property
    def size(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters)


@dataclass(kw_only=True, eq=False)
class GradientReducer:
    """Reduces the gradients of one optimizer. All ranks make their reducers in the same order."""

    parameters: Sequence[torch.nn.Parameter]
    passes: int
    """Backward passes to accumulate gradients over before they are reduced."""

    op: Any
    predivide: float
    compression: type[Compressor]
    _buckets: list[_Bucket] = field(default_factory=list, init=False)
    _seen: dict[torch.nn.Parameter, int] = field(default_factory=dict, init=False)
    """Number of passes since the last step in which a parameter had a gradient."""

    _sparse: set[torch.nn.Parameter] = field(default_factory=set, init=False)
    _launched: int = field(default=0, init=False)
    """Number of buckets whose reduction has begun."""

    _logged: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        torch_op(self.op)
        self._group = _own_group(self.parameters)
        self._buckets = [
            _Bucket(parameters=bucket) for bucket in buckets(self.parameters, least=_BUCKET)
        ]
        self._bucket_of = {
            parameter: bucket for bucket in self._buckets for parameter in bucket.parameters
        }
        self._number = len(_reducers)
        _reducers.append(self)
        self.reset()
        for parameter in self.parameters:
            if self.op is Average:
                parameter.register_hook(weighted_gradient)
            parameter.register_post_accumulate_grad_hook(self._add)

    @property
    def is_under_way(self) -> bool:
        """Whether gradients are being reduced."""
        return self._logged is not None

    def reset(self) -> None:
        """Forget which gradients are ready."""
        self._seen = dict.fromkeys(self.parameters, 0)
        self._launched, self._logged = 0, None
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)
            bucket.sent = bucket.work = None
            bucket.packed = ()

    def synchronize(self) -> None:
        """Replace each parameter's gradient by its reduction over all ranks.

        Raises:
            RuntimeError: one has changed since its reduction began.
        """
        self._begin()
        self._launch(until=len(self._buckets))
        for bucket in self._buckets:
            bucket.work.wait()
        assert self._logged is not None
        completed(self._logged)
        try:
            # All of them first: gradients stay as they are, or are all reduced.
            for bucket in self._buckets:
                _expect_unchanged(bucket)
            for bucket in self._buckets:
                self._unpack(bucket)
        finally:
            self.reset()

    def take_part(self) -> None:
        """Take part in other ranks' step, with zero gradients."""
        works = []
        for bucket in self._buckets:
            first = bucket.parameters[0]
            zeros, _ = self.compression.compress(
                on_group_device(torch.zeros(bucket.size, dtype=first.dtype, device=first.device))
            )
            works.append(dist.all_reduce(zeros, torch_op(self.op), self._group, async_op=True))
        for work in works:
            work.wait()

    def _add(self, parameter: torch.Tensor) -> None:
        assert isinstance(parameter, torch.nn.Parameter)
        self._seen[parameter] += 1
        if self._seen[parameter] > self.passes:
            raise AssertionError(
                f"Gradients were computed in more than backward_passes_per_step={self.passes} "
                "backward passes before step(). Raise backward_passes_per_step to add up the "
                "gradients of more passes."
            )
        if self._seen[parameter] < self.passes:
            return
        self._begin()
        self._bucket_of[parameter].missing -= 1
        ready = self._launched
        while ready < len(self._buckets) and not self._buckets[ready].missing:
            ready += 1
        self._launch(until=ready)

    def _begin(self) -> None:
        if self._logged is None:
            self._logged = log_call("gradients", self._number)
            before_average()

    def _launch(self, *, until: int) -> None:
        for bucket in self._buckets[self._launched : until]:
            self._pack(bucket)
            bucket.work = dist.all_reduce(
                bucket.sent, torch_op(self.op), self._group, async_op=True
            )
        self._launched = max(self._launched, until)

    @torch.no_grad()
    def _pack(self, bucket: _Bucket) -> None:
        bucket.packed = _looks(bucket.parameters)
        flat = torch.cat([self._gradient(parameter).reshape(-1) for parameter in bucket.parameters])
        scale(flat, 1 / self.predivide)
        bucket.sent, bucket.compressed_as = self.compression.compress(on_group_device(flat))

    def _gradient(self, parameter: torch.nn.Parameter) -> torch.Tensor:
        gradient = parameter.grad
        if gradient is None:
            return torch.zeros_like(parameter)
        if gradient.is_sparse:
            self._sparse.add(parameter)
            return gradient.to_dense()
        return gradient.to(parameter.dtype)

    @torch.no_grad()
    def _unpack(self, bucket: _Bucket) -> None:
        assert bucket.sent is not None
        flat = self.compression.decompress(bucket.sent, bucket.compressed_as)
        scale(flat, self.predivide / (dist.get_world_size() if self.op is Average else 1))
        sizes = [parameter.numel() for parameter in bucket.parameters]
        for parameter, part in zip(bucket.parameters, flat.split(sizes), strict=True):
            reduced = part.view(parameter.shape).to(parameter.device)
            if parameter in self._sparse:
                parameter.grad = reduced.to_sparse(1)
            elif parameter.grad is None:
                parameter.grad = reduced.clone()
            else:
                parameter.grad.copy_(reduced)


def _expect_unchanged(bucket: _Bucket) -> None:
    for (now, writes), (then, writes_then) in zip(
        _looks(bucket.parameters), bucket.packed, strict=True
    ):
        if now is not then or writes != writes_then:
            raise RuntimeError(
                "Gradients were changed, for example clipped, while they were reduced over the "
                "ranks, which would undo it. Call optimizer.synchronize() before, and "
                "optimizer.step() within optimizer.skip_synchronize()."
            )


def _looks(parameters: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor | None, int]]:
    gradients = [parameter.grad for parameter in parameters]
    return [(each, 0 if each is None else version_of(each)) for each in gradients]


_reducers: list[GradientReducer] = []
"""The reducers, in the order in which the optimizers were made."""


def take_part(number: int) -> None:
    """Take part in other ranks' step of the optimizer with this number, with zero gradients."""
    _reducers[number].take_part()


def _own_group(parameters: Sequence[torch.nn.Parameter]) -> Any:
    """Return a process group for gradients, so that they needn't be in order with other calls."""
    device = parameters[0].device if parameters else current_device()
    group = gradient_group(device)
    return dist.new_group() if group is dist.group.WORLD else group
