"""Whether anything uses `parameter.data`: what is written there changes no version of a tensor."""

from __future__ import annotations

import sys
from typing import Any

import torch

_DATA: Any = torch.Tensor.data
_TORCHS_OWN = vars(torch.nn.parameter)

_number = 0


def count() -> None:
    """Have `accesses` count, in this process and from now on."""
    torch.nn.Parameter.data = property(_read, _set)


def accesses() -> int:
    """Return how often anything has read or set it since `count`."""
    return _number


def _read(parameter: torch.nn.Parameter) -> torch.Tensor:
    reader = sys._getframe().f_back
    # Torch copies and pickles parameters by it.
    if reader is None or reader.f_globals is not _TORCHS_OWN:
        _note()
    found: torch.Tensor = _DATA.__get__(parameter)
    return found


def _set(parameter: torch.nn.Parameter, value: torch.Tensor) -> None:
    # A module that is moved to where it is gets what it has. Without values, nothing is written.
    is_plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided
    is_own = is_plain and value.device == parameter.device and not parameter.is_meta
    if not (parameter.is_meta or (is_own and value.is_set_to(parameter))):
        _note()
    _DATA.__set__(parameter, value)


def _note() -> None:
    global _number
    _number += 1
