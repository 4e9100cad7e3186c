"""What users report, as values that can travel and be stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


def plain_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics as plain values: arrays and tensors of one element become numbers.

    Raises:
        TypeError: if one is neither a number, a string nor a list or dict of them.
    """
    if not isinstance(metrics, Mapping):
        raise TypeError(f"report takes a dict of metrics, not {type(metrics).__name__}.")
    return {str(name): _plain(str(name), value) for name, value in metrics.items()}


def _plain(name: str, value: Any) -> Any:
    if _is_plain(value):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(f"{name}/{key}", inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(name, inner) for inner in value]
    try:
        # Most frameworks' tensors have `item`, TensorFlow's become an array that has it; both
        # refuse more than one element. An object that is none comes back as it is.
        number = value.item() if hasattr(value, "item") else np.asarray(value).item()
    except (ValueError, RuntimeError, TypeError):
        number = value
    if _is_plain(number):
        return number
    if type(number) is int:
        raise TypeError(
            f"The metric {name!r} is {number}, a whole number of more than 64 bits. Report it as a "
            "float or a string."
        )
    raise TypeError(
        f"The metric {name!r} is of the type {type(value).__name__}, which can't be stored. Report "
        "a number, a string, or a list or dict of them; of an array, for example its mean."
    )


def _is_plain(value: Any) -> bool:
    """Whether a value can travel as it is, and stand in a manifest."""
    if type(value) is int:
        return -(2**63) <= value < 2**63
    if type(value) is str:
        # File names may hold bytes that are no text.
        return not any("\ud800" <= character <= "\udfff" for character in value)
    return value is None or type(value) in (bool, float)
