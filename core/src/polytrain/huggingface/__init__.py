"""Hugging Face's libraries."""

from __future__ import annotations

from polytrain.lazy_names import LazyNames

_NAMES = LazyNames(module=__name__, modules=("transformers",))

__getattr__ = _NAMES.get
__dir__ = _NAMES.names
