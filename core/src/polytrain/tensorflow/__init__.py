"""TensorFlow: what `polytrain_tf` has, and the trainer with Ray Train's signature."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polytrain.ray_names.doors import Door

if TYPE_CHECKING:
    from polytrain.ray_names.configs import TensorflowConfig as TensorflowConfig
    from polytrain.ray_names.trainers import TensorflowTrainer as TensorflowTrainer
    from polytrain_tf import TensorFlow as TensorFlow
    from polytrain_tf import TensorFlowShard as TensorFlowShard
    from polytrain_tf import strategy as strategy

_DOOR = Door(
    module=__name__,
    homes={
        "polytrain.ray_names.configs": ("TensorflowConfig",),
        "polytrain.ray_names.trainers": ("TensorflowTrainer",),
    },
    modules=("keras",),
    plugin="polytrain_tf",
    backend="tensorflow",
)


def __getattr__(name: str) -> Any:
    return _DOOR.get(name)


def __dir__() -> list[str]:
    return _DOOR.names()
