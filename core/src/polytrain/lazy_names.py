"""Modules that only lead to others: what is behind a name is imported when it is first used."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from types import FrameType
from typing import Any

from polytrain import satellites


class LazyNames:
    """The names of such a module. No dataclass: `import polytrain` needs this, and not those."""

    def __init__(
        self,
        *,
        module: str,
        homes: Mapping[str, tuple[str, ...]] | None = None,
        modules: tuple[str, ...] = (),
    ) -> None:
        """
        Args:
            module: its own name.
            homes: a module → the names that it defines.
            modules: modules below it.
        """
        self.module = module
        self.modules = modules
        self.homes = {name: home for home, names in (homes or {}).items() for name in names}

    def get(self, name: str) -> Any:
        """Return what a name stands for. Call it from `__getattr__` of the module.

        Raises:
            AttributeError: there is no such name; in an import statement ImportError.
        """
        if name in self.modules:
            value = import_module(f"{self.module}.{name}")
        elif name in self.homes:
            value = getattr(import_module(self.homes[name]), name)
        elif name.startswith("_"):
            raise _unknown(self.module, name)
        else:
            value = self._other(name)
        # Found directly from now on: `report` is called in loops.
        setattr(sys.modules[self.module], name, value)
        return value

    def names(self) -> list[str]:
        """Return the public names."""
        return sorted({*self.homes, *self.modules})

    def _other(self, name: str) -> Any:
        raise missing(self.module, name)


def missing(module: str, name: str) -> Exception:
    """Return the error for a name that a module doesn't have."""
    instead = satellites.missing.sentence(module, name) if satellites.has("missing") else None
    if instead is None:
        return _unknown(module, name)
    # `from module import name` replaces the text of an AttributeError by its own.
    is_import = _is_import_statement(sys._getframe(1))
    return ImportError(instead, name=module) if is_import else AttributeError(instead)


def _unknown(module: str, name: str) -> AttributeError:
    _, _, last = module.rpartition(".")
    what = f"{last!r} object" if last[:1].isupper() else f"module {module!r}"
    # With the module Python's tracebacks suggest a name.
    found = sys.modules.get(module)
    return AttributeError(f"{what} has no attribute {name!r}", name=name, obj=found)


def _is_import_statement(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_name in ("get", "_other", "__getattr__"):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == "_handle_fromlist"


class RayTrainClass(type):
    """The type of a class of Ray Train's: answers for what only Ray Train's class has."""

    _theirs: str
    """Its name there."""

    def __getattr__(cls, name: str) -> Any:
        if name == "_theirs":
            raise AttributeError(name)
        raise missing(f"polytrain.{cls._theirs}", name)
