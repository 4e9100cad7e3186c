"""Reports and checkpoints for training functions that call `xgboost.train`."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xgboost

import polytrain
from polytrain_xgboost.engine import MODEL_FILE


class ReportCallback(xgboost.callback.TrainingCallback):
    """Reports metrics after every round, and a checkpoint at an interval and at the end."""

    def __init__(self, *, checkpoint_frequency: int = 0) -> None:
        """
        Args:
            checkpoint_frequency: rounds between two checkpoints; 0 for a last one only.
        """
        super().__init__()
        self._frequency = checkpoint_frequency
        self._unreported: tuple[int, Mapping[str, Any]] | None = None
        """The previous round and its metrics: only the next call shows whether it was the last."""

    def before_iteration(self, model: Any, epoch: int, evals_log: Any) -> bool:
        self._report(model, is_last=False)
        return False

    def after_iteration(self, model: Any, epoch: int, evals_log: Any) -> bool:
        metrics = {
            f"{dataset}-{metric}": values[-1]
            for dataset, of_metric in evals_log.items()
            for metric, values in of_metric.items()
        }
        self._unreported = (epoch + 1, metrics)
        return False

    def after_training(self, model: Any) -> Any:
        self._report(model, is_last=True)
        return model

    def _report(self, model: xgboost.Booster, *, is_last: bool) -> None:
        if self._unreported is None:
            return
        round_, metrics = self._unreported
        self._unreported = None
        is_due = self._frequency > 0 and round_ % self._frequency == 0
        if polytrain.get_context().get_world_rank() > 0 or not (is_due or is_last):
            polytrain.report(metrics)
            return
        with tempfile.TemporaryDirectory() as directory:
            model.save_model(Path(directory, MODEL_FILE))
            polytrain.report(metrics, checkpoint=polytrain.Checkpoint.from_directory(directory))


def checkpointed_model() -> xgboost.Booster | None:
    """Return the checkpoint's model, for `xgboost.train(xgb_model=…)`; None without a checkpoint.

    Raises:
        NotInWorkerError: outside a training function.
    """
    checkpoint = polytrain.get_checkpoint()
    if checkpoint is None:
        return None
    with checkpoint.as_directory() as directory:
        return xgboost.Booster(model_file=Path(directory, MODEL_FILE))
