"""Hugging Face's `Trainer` in a training function, with its checkpoints in the run's."""

from polytrain_torch.libraries import needed

with needed("transformers"), needed("accelerate"):
    from polytrain_torch.transformers.trainer import (
        RayTrainReportCallback,
        ReportCallback,
        prepare_trainer,
    )

__all__ = ["RayTrainReportCallback", "ReportCallback", "prepare_trainer"]
