"""Hugging Face's libraries."""

from __future__ import annotations

from typing import Any

from polytrain.lazy_names import LazyNames

_NAMES = LazyNames(module=__name__, modules=("transformers",))


def __getattr__(name: str) -> Any:
    return _NAMES.get(name)


def __dir__() -> list[str]:
    return _NAMES.names()
