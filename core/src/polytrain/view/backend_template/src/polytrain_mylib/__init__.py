"""mylib on polytrain."""

from __future__ import annotations

from polytrain_mylib.backend import Mylib
from polytrain_plugins import Backend, hookimpl

__all__ = ["Mylib"]


@hookimpl
def polytrain_backends() -> list[type[Backend]]:
    """Return the backends of this module, which the entry point in pyproject.toml names."""
    return [Mylib]
