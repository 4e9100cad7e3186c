"""Saves and loads files so that loading can't run stored code."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch


def loaded(file: Path) -> Any:
    """Load a file of `save_safely`, with tensors on the CPU."""
    return torch.load(file, weights_only=True, map_location="cpu")


def save_safely(state: Any, file: Path) -> None:
    """Write tensors and plain data.

    Raises:
        TypeError: the state has other objects, and couldn't be loaded safely.
    """
    torch.save(state, file)
    refuse_unsafe_file(file)


def refuse_unsafe(state: Any) -> None:
    """Refuse a state that could be written, but not loaded safely. Tensors aren't checked.

    Raises:
        TypeError: the state has an object that can't be loaded safely.
    """
    file = io.BytesIO()
    torch.save(_without_tensors(state), file)
    file.seek(0)
    refuse_unsafe_file(file)


def _without_tensors(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return None
    if isinstance(state, Mapping):
        return {name: _without_tensors(each) for name, each in state.items()}
    if type(state) in (list, tuple):
        return [_without_tensors(each) for each in state]
    return state


def refuse_unsafe_file(file: Path | io.BytesIO) -> None:
    """Refuse a file that couldn't be loaded safely.

    Raises:
        TypeError: it can't be.
    """
    unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    if unsafe:
        raise TypeError(
            f"A checkpoint can't hold {', '.join(sorted(unsafe))}: torch.load(weights_only=True) "
            "can't load it. Pass tensors, numbers, strings, and lists and dicts of them; or allow "
            "the type with torch.serialization.add_safe_globals."
        )
