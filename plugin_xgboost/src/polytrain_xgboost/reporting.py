"""Reports and checkpoints for training functions that call `xgboost.train`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xgboost

from polytrain.boosting import report_callbacks
from polytrain.boosting.report_callbacks import RayTrainReporter, RoundReporter
from polytrain_xgboost.engine import MODEL_FILE


class ReportCallback(RoundReporter, xgboost.callback.TrainingCallback):
    """Reports metrics after every round, and a checkpoint at an interval and at the end."""

    CHECKPOINT_NAME = MODEL_FILE

    _unreported: tuple[int, Mapping[str, Any]] | None = None
    """The previous round and its metrics, kept until the next call shows if it was the last."""

    def before_iteration(self, model: Any, epoch: int, evals_log: Any) -> bool:
        self._report_previous(model, is_last=False)
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
        self._report_previous(model, is_last=True)
        return model

    def _report_previous(self, model: xgboost.Booster, *, is_last: bool) -> None:
        if self._unreported is None:
            return
        round_, metrics = self._unreported
        self._unreported = None
        self._report(round_, metrics, is_last=is_last, save=model.save_model)


class RayTrainReportCallback(RayTrainReporter, ReportCallback):
    """Reports like `ReportCallback`, with the arguments of Ray Train's callback of this name."""

    @staticmethod
    def read_model(path: Path) -> xgboost.Booster:
        return xgboost.Booster(model_file=path)


def checkpointed_model() -> xgboost.Booster | None:
    """Return the checkpoint's model, for `xgboost.train(xgb_model=…)`; None without a checkpoint.

    Raises:
        NotInWorkerError: outside a training function.
    """
    return report_callbacks.checkpointed_model(RayTrainReportCallback)
