"""Hugging Face's `Trainer`: what `polytrain_torch.transformers` has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polytrain.ray_names.doors import Door

if TYPE_CHECKING:
    from polytrain_torch.transformers import RayTrainReportCallback as RayTrainReportCallback
    from polytrain_torch.transformers import ReportCallback as ReportCallback
    from polytrain_torch.transformers import prepare_trainer as prepare_trainer

_DOOR = Door(
    module=__name__,
    plugin="polytrain_torch.transformers",
    backend="torch",
)


def __getattr__(name: str) -> Any:
    return _DOOR.get(name)


def __dir__() -> list[str]:
    return _DOOR.names()
