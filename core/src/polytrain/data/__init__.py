"""Data sets: which rank has which rows, where they come from, and how a worker reads them."""

from __future__ import annotations

from polytrain.lazy_names import LazyNames

_NAMES = LazyNames(module=__name__, homes={"polytrain.config.configs": ("DataConfig",)})

__getattr__ = _NAMES.get
