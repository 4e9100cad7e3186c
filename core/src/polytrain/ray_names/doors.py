"""Modules that lead to a plugin: they have all of its names, and some of polytrain's own."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

from polytrain.lazy_names import LazyNames, missing
from polytrain.ray_names.missing import sentence

_TRAINERS = "polytrain.ray_names.trainers"


class Door(NamedTuple):
    """What a module leads to."""

    backend: str
    """The backend that comes with the plugin."""

    plugin: str
    """The plugin's module."""

    own: tuple[str, ...] = ()
    """Names in `ray_names.trainers`, which aren't the plugin's."""

    modules: tuple[str, ...] = ()
    """Modules below it."""


_DOORS = {
    "polytrain.torch": Door("torch", "polytrain_torch", own=("TorchConfig", "TorchTrainer")),
    "polytrain.lightning": Door("torch", "polytrain_torch.lightning.parts"),
    "polytrain.huggingface.transformers": Door("torch", "polytrain_torch.transformers"),
    "polytrain.xgboost": Door(
        "xgboost", "polytrain_xgboost", own=("XGBoostConfig", "XGBoostTrainer")
    ),
    "polytrain.lightgbm": Door(
        "lightgbm", "polytrain_lightgbm", own=("LightGBMConfig", "LightGBMTrainer")
    ),
    "polytrain.tensorflow": Door(
        "tensorflow",
        "polytrain_tf",
        own=("TensorflowConfig", "TensorflowTrainer"),
        modules=("keras",),
    ),
    "polytrain.tensorflow.keras": Door("tensorflow", "polytrain_tf.keras_callback"),
}


def door(module: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a door.

    Args:
        module: its name.
    """
    names = PluginNames(module, _DOORS[module])
    return names.get, names.names


class PluginNames(LazyNames):
    """The names of a plugin, and some of polytrain's own."""

    def __init__(self, module: str, leads_to: Door) -> None:
        super().__init__(module=module, homes={_TRAINERS: leads_to.own}, modules=leads_to.modules)
        self.plugin, self.backend = leads_to.plugin, leads_to.backend

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
