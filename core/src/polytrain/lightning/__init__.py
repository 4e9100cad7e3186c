"""PyTorch Lightning: what `polytrain_torch.lightning.parts` has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polytrain.ray_names.doors import Door

if TYPE_CHECKING:
    from polytrain_torch.lightning.parts import RayDDPStrategy as RayDDPStrategy
    from polytrain_torch.lightning.parts import RayDeepSpeedStrategy as RayDeepSpeedStrategy
    from polytrain_torch.lightning.parts import RayFSDPStrategy as RayFSDPStrategy
    from polytrain_torch.lightning.parts import RayLightningEnvironment as RayLightningEnvironment
    from polytrain_torch.lightning.parts import RayTrainReportCallback as RayTrainReportCallback
    from polytrain_torch.lightning.parts import Trainer as Trainer
    from polytrain_torch.lightning.parts import WorkerEnvironment as WorkerEnvironment
    from polytrain_torch.lightning.parts import prepare_trainer as prepare_trainer

_DOOR = Door(
    module=__name__,
    plugin="polytrain_torch.lightning.parts",
    backend="torch",
)


def __getattr__(name: str) -> Any:
    return _DOOR.get(name)


def __dir__() -> list[str]:
    return _DOOR.names()
