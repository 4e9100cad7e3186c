"""Recognises Ray's data sets, without importing Ray or Arrow."""

from __future__ import annotations

from typing import Any


def is_ray_dataset(data: Any) -> bool:
    """Whether this is a `ray.data.Dataset`; Ray Data is not imported to find out."""
    return type(data).__module__.startswith("ray.data.")
