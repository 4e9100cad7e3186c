"""Trackers: experiment stores that get a run's reports while it lasts.

`Prometheus` exposes a run for monitoring: it doesn't store every step.

Importing this package imports no tracker's library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from polytrain.lazy_names import LazyNames

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

_NAMES = LazyNames(
    module=__name__,
    homes={
        "polytrain.trackers.csv_file": ("CSV",),
        "polytrain.trackers.mlflow": ("MLflow",),
        "polytrain.trackers.prometheus": ("Prometheus",),
        "polytrain.trackers.tensorboard": ("TensorBoard",),
        "polytrain.trackers.wandb": ("WandB",),
    },
)

__getattr__ = _NAMES.get
__dir__ = _NAMES.names
