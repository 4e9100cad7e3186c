"""Compression of tensors before they are sent."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class Compressor(Protocol):
    """Compresses tensors before they are sent. Users may pass their own class."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor to send, and the context for `decompress`."""
        ...

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the operation's result in the original dtype."""
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
    """Values for the argument `compression`."""

    none = _Unchanged
    """Send tensors as they are."""

    fp16 = _HalfPrecision
    """Send floating-point tensors as float16; they are also summed as float16."""
