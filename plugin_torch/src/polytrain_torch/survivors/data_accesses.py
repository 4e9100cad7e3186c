"""Whether anything uses `parameter.data`: what is written there changes no version of a tensor."""

from __future__ import annotations

import sys
from typing import Any

import torch

_DATA: Any = torch.Tensor.data

_number = 0


def accesses() -> int:
    """Return how often anything has read or set it in this process, since the first call."""
    if "data" not in vars(torch.nn.Parameter):
        torch.nn.Parameter.data = property(_read, _set)
    return _number


def _read(parameter: torch.nn.Parameter) -> torch.Tensor:
    # Torch's own code copies and pickles it.
    if sys._getframe(1).f_globals["__name__"] != torch.nn.parameter.__name__:
        _count()
    found: torch.Tensor = _DATA.__get__(parameter)
    return found


def _set(parameter: torch.nn.Parameter, value: torch.Tensor) -> None:
    _count()
    _DATA.__set__(parameter, value)


def _count() -> None:
    global _number
    _number += 1
