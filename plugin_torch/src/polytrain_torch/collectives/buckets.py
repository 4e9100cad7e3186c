"""Divides parameters into buckets, whose gradients are sent together while others are computed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch

AnyTensor = TypeVar("AnyTensor", bound=torch.Tensor)


def buckets(parameters: Iterable[AnyTensor], *, least: int) -> Iterator[list[AnyTensor]]:
    """Yield buckets from the last parameter to the first, as the backward pass reaches them.

    Args:
        parameters: the parameters, in the order of the model.
        least: bytes of a bucket, at least; the last one of a type and device may be smaller.
    """
    alike: dict[tuple[torch.dtype, torch.device], list[AnyTensor]] = {}
    for parameter in reversed([*parameters]):
        alike.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    for group in alike.values():
        bucket: list[AnyTensor] = []
        size = 0
        for parameter in group:
            bucket.append(parameter)
            size += parameter.nbytes
            if size >= least:
                yield bucket
                bucket, size = [], 0
        if bucket:
            yield bucket
