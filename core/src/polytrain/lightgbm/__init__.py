"""LightGBM: what `polytrain_lightgbm` has, and the trainer with Ray Train's signature."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polytrain.ray_names.doors import Door

if TYPE_CHECKING:
    from polytrain.ray_names.configs import LightGBMConfig as LightGBMConfig
    from polytrain.ray_names.trainers import LightGBMTrainer as LightGBMTrainer
    from polytrain_lightgbm import LightGBM as LightGBM
    from polytrain_lightgbm import RayTrainReportCallback as RayTrainReportCallback
    from polytrain_lightgbm import bin_reference as bin_reference
    from polytrain_lightgbm import get_network_params as get_network_params
    from polytrain_lightgbm import network_params as network_params
    from polytrain_lightgbm import normalize_pandas_for_lightgbm as normalize_pandas_for_lightgbm

_DOOR = Door(
    module=__name__,
    homes={
        "polytrain.ray_names.configs": ("LightGBMConfig",),
        "polytrain.ray_names.trainers": ("LightGBMTrainer",),
    },
    plugin="polytrain_lightgbm",
    backend="lightgbm",
)


def __getattr__(name: str) -> Any:
    return _DOOR.get(name)


def __dir__() -> list[str]:
    return _DOOR.names()
