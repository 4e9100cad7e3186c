"""Finds metrics by name: `a/b` is the entry `b` of a metric `a` that is a dict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def named_metric(metrics: Mapping[str, Any], name: str) -> Any:
    """Return the metric of this name.

    Raises:
        KeyError: there is none.
    """
    if name in metrics:
        return metrics[name]
    value: Any = metrics
    for key in name.split("/"):
        if not isinstance(value, Mapping):
            raise KeyError(name)
        value = value[key]
    return value
