"""Queries Ray's own state, and recognises its data sets."""

from __future__ import annotations

from typing import Any


def is_ray_dataset(data: Any) -> bool:
    """Return whether this is a `ray.data.Dataset`, without importing Ray Data."""
    return type(data).__module__.startswith("ray.data.")
