"""Hugging Face's libraries."""

from __future__ import annotations

from typing import Any

from polytrain.ray_names.doors import Door

_DOOR = Door(module=__name__, doors=("transformers",))


def __getattr__(name: str) -> Any:
    return _DOOR.get(name)


def __dir__() -> list[str]:
    return _DOOR.names()
