"""XGBoost: what `polytrain_xgboost` has, and the trainer with Ray Train's signature."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polytrain.ray_names.doors import Door

if TYPE_CHECKING:
    from polytrain.ray_names.configs import XGBoostConfig as XGBoostConfig
    from polytrain.ray_names.trainers import XGBoostTrainer as XGBoostTrainer
    from polytrain_xgboost import RayTrainReportCallback as RayTrainReportCallback
    from polytrain_xgboost import XGBoost as XGBoost
    from polytrain_xgboost import bin_reference as bin_reference

_DOOR = Door(
    module=__name__,
    homes={
        "polytrain.ray_names.configs": ("XGBoostConfig",),
        "polytrain.ray_names.trainers": ("XGBoostTrainer",),
    },
    plugin="polytrain_xgboost",
    backend="xgboost",
)


def __getattr__(name: str) -> Any:
    return _DOOR.get(name)


def __dir__() -> list[str]:
    return _DOOR.names()
