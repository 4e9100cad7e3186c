"""Compression of what is sent."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class Compressor(Protocol):
    """Makes tensors smaller for the way. Users may pass their own."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tensor to send, and what `decompress` needs."""
        ...

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The tensor as it was, after the operation."""
        ...


class _Unchanged:
    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor


class _HalfPrecision:
    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor.half() if tensor.is_floating_point() else tensor, tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor.to(ctx)


class Compression:
    """What `compression=` takes."""

    none = _Unchanged
    """Send tensors as they are."""

    fp16 = _HalfPrecision
    """Send floating point numbers in 16 bits; they are also added up in 16 bits."""
