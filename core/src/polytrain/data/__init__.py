"""Data sets: which rank has which rows, where they come from, and how a worker reads them."""

from __future__ import annotations

from typing import Any

from polytrain.ray_names.doors import Door

_DOOR = Door(module=__name__, homes={"DataConfig": "polytrain.config.configs"})


def __getattr__(name: str) -> Any:
    return _DOOR.get(name)
