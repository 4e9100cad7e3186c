"""Modules that only lead to others: what is behind a name is imported when it is first used."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from types import FrameType
from typing import Any

from polytrain.ray_names.missing import sentence


@dataclass(frozen=True, slots=True, kw_only=True)
class Door:
    """The names of such a module: some by their homes, and all that a plugin has."""

    module: str
    """Its own name."""

    homes: Mapping[str, str] = field(default_factory=dict)
    """Name → the module that defines it."""

    doors: tuple[str, ...] = ()
    """Modules below it."""

    plugin: str | None = None
    """A plugin's module, whose public names it has too."""

    backend: str | None = None
    """The backend that comes with the plugin."""

    def get(self, name: str) -> Any:
        """What a name stands for. Call it from `__getattr__` of the module.

        Raises:
            AttributeError: there is no such name; in an import statement ImportError.
            ModuleNotFoundError: the plugin or its framework isn't installed; the message has the
                command that installs it.
        """
        if name in self.doors:
            value = import_module(f"{self.module}.{name}")
        elif name in self.homes:
            value = getattr(import_module(self.homes[name]), name)
        elif name.startswith("_"):
            raise AttributeError(f"module {self.module!r} has no attribute {name!r}")
        elif sentence(self.module, name) is not None or self.plugin is None:
            raise missing(self.module, name)
        else:
            value = self._of_plugin(self.plugin, name)
        # Found directly from now on.
        setattr(sys.modules[self.module], name, value)
        return value

    def names(self) -> list[str]:
        """The public names, without those of a plugin that isn't installed."""
        try:
            plugin = import_module(self.plugin) if self.plugin else None
        except ModuleNotFoundError:
            plugin = None
        own = getattr(plugin, "__all__", ())
        return sorted({*self.homes, *self.doors, *own})

    def _of_plugin(self, plugin: str, name: str) -> Any:
        try:
            module = import_module(plugin)
            if name not in module.__all__:
                raise missing(self.module, name)
            return getattr(module, name)
        except ModuleNotFoundError as error:
            command = self._command(error.name)
            if command is None:
                raise
            raise ModuleNotFoundError(
                f"{self.module}.{name} needs {error.name}, which isn't installed. "
                f"Install it with: {command}",
                name=error.name,
            ) from None

    def _command(self, lacking: str | None) -> str | None:
        """The command that installs a module; None if it is neither plugin nor framework."""
        from polytrain_plugins import load_backend
        from polytrain_plugins.installation import install_command
        from polytrain_plugins.registry import install_line

        if self.plugin is None or self.backend is None:
            return None
        if (lacking or "").partition(".")[0] == self.plugin.partition(".")[0]:
            return install_line(self.backend)
        command = load_backend(self.backend).requires.get(lacking or "")
        return None if command is None else install_command(command)


def missing(module: str, name: str) -> Exception:
    """The error for a name that a module doesn't have."""
    instead = sentence(module, name)
    if instead is None:
        return AttributeError(f"module {module!r} has no attribute {name!r}")
    # `from module import name` replaces the text of an AttributeError by its own.
    is_import = _is_import_statement(sys._getframe(1))
    return ImportError(instead, name=module) if is_import else AttributeError(instead)


def _is_import_statement(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_name in ("get", "_of_plugin", "__getattr__"):
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
