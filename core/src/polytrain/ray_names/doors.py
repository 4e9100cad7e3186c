"""Modules that lead to a plugin: they have all of its names, and some of polytrain's own."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from polytrain.lazy_names import LazyNames, missing
from polytrain.ray_names.missing import sentence


class Door(LazyNames):
    """The names of such a module."""

    def __init__(
        self,
        *,
        module: str,
        homes: Mapping[str, tuple[str, ...]] | None = None,
        modules: tuple[str, ...] = (),
        plugin: str,
        backend: str,
    ) -> None:
        """
        Args:
            module: its own name.
            homes: a module → the names that it defines.
            modules: modules below it.
            plugin: the plugin's module, whose public names it has.
            backend: the backend that comes with the plugin.
        """
        super().__init__(module=module, homes=homes, modules=modules)
        self.plugin = plugin
        self.backend = backend

    def names(self) -> list[str]:
        """Return the public names, without those of a plugin that isn't installed."""
        try:
            own = import_module(self.plugin).__all__
        except ModuleNotFoundError:
            own = ()
        return sorted({*self.homes, *self.modules, *own})

    def _other(self, name: str) -> Any:
        """Return what the plugin has under a name.

        Raises:
            ModuleNotFoundError: the plugin or its framework isn't installed; the message has the
                command that installs it.
        """
        if sentence(self.module, name) is not None:
            raise missing(self.module, name)
        try:
            module = import_module(self.plugin)
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
        """Return the command that installs a module; None if it is neither plugin nor framework."""
        from polytrain_plugins import load_backend
        from polytrain_plugins.installation import install_command
        from polytrain_plugins.registry import install_line

        if (lacking or "").partition(".")[0] == self.plugin.partition(".")[0]:
            return install_line(self.backend)
        command = load_backend(self.backend).requires.get(lacking or "")
        return None if command is None else install_command(command)
