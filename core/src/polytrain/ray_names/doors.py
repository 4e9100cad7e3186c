"""Modules that lead to a plugin: they have all of its names, and some of polytrain's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from polytrain.lazy_names import LazyNames, missing
from polytrain.ray_names.missing import sentence

_PLUGINS = {
    "polytrain.torch": ("torch", "polytrain_torch"),
    "polytrain.lightning": ("torch", "polytrain_torch.lightning.parts"),
    "polytrain.huggingface.transformers": ("torch", "polytrain_torch.transformers"),
    "polytrain.xgboost": ("xgboost", "polytrain_xgboost"),
    "polytrain.lightgbm": ("lightgbm", "polytrain_lightgbm"),
    "polytrain.tensorflow": ("tensorflow", "polytrain_tf"),
    "polytrain.tensorflow.keras": ("tensorflow", "polytrain_tf.keras_callback"),
}
"""Door → the backend whose plugin it leads to, and that plugin's module."""

_OWN: Mapping[str, tuple[str, ...]] = {
    "polytrain.torch": ("TorchConfig", "TorchTrainer"),
    "polytrain.xgboost": ("XGBoostConfig", "XGBoostTrainer"),
    "polytrain.lightgbm": ("LightGBMConfig", "LightGBMTrainer"),
    "polytrain.tensorflow": ("TensorflowConfig", "TensorflowTrainer"),
}
"""Door → its names in `ray_names.trainers`, which aren't the plugin's."""

_MODULES = {"polytrain.tensorflow": ("keras",)}


def door(module: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a door.

    Args:
        module: its name.
    """
    backend, plugin = _PLUGINS[module]
    names = PluginNames(
        module=module,
        homes={"polytrain.ray_names.trainers": _OWN[module]} if module in _OWN else None,
        modules=_MODULES.get(module, ()),
        plugin=plugin,
        backend=backend,
    )
    return names.get, names.names


class PluginNames(LazyNames):
    """The names of a plugin, and some of polytrain's own."""

    def __init__(
        self,
        *,
        module: str,
        homes: Mapping[str, tuple[str, ...]] | None,
        modules: tuple[str, ...],
        plugin: str,
        backend: str,
    ) -> None:
        """
        Args:
            module: the module that has them.
            homes: a module → the names of polytrain's that it defines.
            modules: modules below it.
            plugin: the plugin's module.
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
        return sorted({*super().names(), *own})

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
        from polytrain_plugins.installed import install_command
        from polytrain_plugins.registry import install_line

        if (lacking or "").partition(".")[0] == self.plugin.partition(".")[0]:
            return install_line(self.backend)
        command = load_backend(self.backend).requires.get(lacking or "")
        return None if command is None else install_command(command)
