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


def flat(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested metrics as one level: `{"a": {"b": 1}}` is `{"a/b": 1}`."""
    return dict(_entries(metrics))


def single_values(metrics: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the metrics that fit into a line, each with its name; none that are lists."""
    single = bool | int | float | str
    return (entry for entry in _entries(metrics) if isinstance(entry[1], single))


def _entries(metrics: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            yield from _entries(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value
