"""PyTorch: what `polytrain_torch` has, and the trainer with Ray Train's signature."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polytrain.ray_names.doors import Door

if TYPE_CHECKING:
    from polytrain.ray_names.configs import TorchConfig as TorchConfig
    from polytrain.ray_names.trainers import TorchTrainer as TorchTrainer
    from polytrain_torch import PreparedDataLoader as PreparedDataLoader
    from polytrain_torch import Torch as Torch
    from polytrain_torch import TorchShard as TorchShard
    from polytrain_torch import TrainingState as TrainingState
    from polytrain_torch import enable_reproducibility as enable_reproducibility
    from polytrain_torch import get_device as get_device
    from polytrain_torch import get_devices as get_devices
    from polytrain_torch import prepare_data_loader as prepare_data_loader
    from polytrain_torch import prepare_model as prepare_model
    from polytrain_torch import seed_everything as seed_everything

_DOOR = Door(
    module=__name__,
    homes={
        "polytrain.ray_names.configs": ("TorchConfig",),
        "polytrain.ray_names.trainers": ("TorchTrainer",),
    },
    plugin="polytrain_torch",
    backend="torch",
)


def __getattr__(name: str) -> Any:
    return _DOOR.get(name)


def __dir__() -> list[str]:
    return _DOOR.names()
