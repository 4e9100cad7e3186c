"""Metrics in a line of text: the first few, with short names and values. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

from polytrain.output.line_layout import cut, printable
from polytrain.text.metrics import single_values

_SHOWN = 4
_NAME_WIDTH, _VALUE_WIDTH = 24, 12


def metrics_text(metrics: Mapping[str, Any]) -> str:
    """Return the first metrics in a line, with the number of the others."""
    shown = metric_texts(metrics)
    more = sum(1 for _ in single_values(metrics)) - len(shown)
    return ", ".join([*shown, *([f"{more} more"] if more else [])])


def metric_texts(metrics: Mapping[str, Any], *, mark: str = "…") -> list[str]:
    """Return the first metrics, each with its name.

    Args:
        mark: stands at the end of what is cut.
    """
    first = islice(single_values(metrics), _SHOWN)
    return [f"{name_text(name, mark=mark)} {value_text(value, mark=mark)}" for name, value in first]


def name_text(name: str, *, mark: str = "…") -> str:
    """Return a metric's name, cut if it is long."""
    return cut(printable(name), _NAME_WIDTH, mark=mark)


def value_text(value: Any, *, mark: str = "…") -> str:
    """Return a metric's value, with at most four digits of a number that isn't whole."""
    text = f"{value:.4g}" if isinstance(value, float) else printable(str(value))
    return cut(text, _VALUE_WIDTH, mark=mark)
