"""Finds metrics by name: `a/b` is the entry `b` of a metric `a` that is a dict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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


def flat_metrics(metrics: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the single values of metrics; the name of a nested one is `a/b`."""
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}/{inner}", each) for inner, each in flat_metrics(value))
        elif isinstance(value, bool | int | float | str):
            yield str(name), value
