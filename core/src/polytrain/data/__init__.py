"""Data sets: which rank has which rows, where they come from, and how a worker reads them."""

from __future__ import annotations

from typing import Any

from polytrain.lazy_names import LazyNames

_NAMES = LazyNames(module=__name__, homes={"polytrain.config.configs": ("DataConfig",)})


def __getattr__(name: str) -> Any:
    return _NAMES.get(name)
