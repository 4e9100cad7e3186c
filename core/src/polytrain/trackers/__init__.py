"""Trackers: experiment stores that get a run's reports while it lasts.

`Prometheus` exposes a run for monitoring: it doesn't store every step.

Importing this package imports no tracker's library.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polytrain.trackers.csv_file import CSV
    from polytrain.trackers.mlflow import MLflow
    from polytrain.trackers.prometheus import Prometheus
    from polytrain.trackers.tensorboard import TensorBoard
    from polytrain.trackers.wandb import WandB

__all__ = ["CSV", "MLflow", "Prometheus", "TensorBoard", "WandB"]

NAMES = {
    "csv": "CSV",
    "mlflow": "MLflow",
    "tensorboard": "TensorBoard",
    "wandb": "WandB",
}
"""Short name for `RunConfig.track` → class."""

_HOMES = {
    "CSV": "polytrain.trackers.csv_file",
    "MLflow": "polytrain.trackers.mlflow",
    "Prometheus": "polytrain.trackers.prometheus",
    "TensorBoard": "polytrain.trackers.tensorboard",
    "WandB": "polytrain.trackers.wandb",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
