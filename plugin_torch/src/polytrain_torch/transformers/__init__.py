"""Hugging Face's `Trainer` in a training function: its checkpoints are the run's."""

from polytrain_torch.transformers.trainer import (
    RayTrainReportCallback,
    ReportCallback,
    prepare_trainer,
)

__all__ = ["RayTrainReportCallback", "ReportCallback", "prepare_trainer"]
