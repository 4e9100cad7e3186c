"""Reports and checkpoints for training functions that call `xgboost.train`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import xgboost

import polytrain
from polytrain.boosting.reported_metrics import ReportedMetrics
from polytrain.boosting.round_reports import RoundReports
from polytrain_xgboost.engine import MODEL_FILE


class ReportCallback(xgboost.callback.TrainingCallback):
    """Reports metrics after every round, and a checkpoint at an interval and at the end."""

    def __init__(self, *, checkpoint_frequency: int = 0) -> None:
        """
        Args:
            checkpoint_frequency: rounds between two checkpoints; 0 for a last one only.
        """
        super().__init__()
        self._reports = RoundReports(filename=MODEL_FILE, frequency=checkpoint_frequency)
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
        self._reports.report(round_, metrics, is_last=is_last, save=model.save_model)


class RayTrainReportCallback(ReportCallback):
    """The same, with the arguments of Ray Train's callback of this name."""

    CHECKPOINT_NAME = MODEL_FILE

    def __init__(
        self,
        metrics: str | Sequence[str] | Mapping[str, str] | None = None,
        filename: str = MODEL_FILE,
        frequency: int = 0,
        checkpoint_at_end: bool = True,
        results_postprocessing_fn: Callable[[dict[str, Any]], Mapping[str, Any]] | None = None,
    ) -> None:
        """
        Args:
            metrics: names such as "valid-logloss", or reported names to such names; all by default.
            filename: the model's file in a checkpoint. `Result.load_model` reads "model.ubj".
            frequency: rounds between two checkpoints; 0 for none before the end.
            checkpoint_at_end: whether the last round has a checkpoint.
            results_postprocessing_fn: applied to the metrics of a round; what it returns is
                reported.
        """
        super().__init__()
        self._reports = RoundReports(
            filename=filename,
            frequency=frequency,
            at_end=checkpoint_at_end,
            reported=ReportedMetrics(
                metrics=metrics, results_postprocessing_fn=results_postprocessing_fn
            ),
        )

    @classmethod
    def get_model(
        cls, checkpoint: polytrain.Checkpoint, filename: str = MODEL_FILE
    ) -> xgboost.Booster:
        """Return the model of a checkpoint.

        Args:
            checkpoint: one that this callback has reported.
            filename: as for the callback.
        """
        with checkpoint.as_directory() as directory:
            return xgboost.Booster(model_file=Path(directory, filename))


def checkpointed_model() -> xgboost.Booster | None:
    """Return the checkpoint's model, for `xgboost.train(xgb_model=…)`; None without a checkpoint.

    Raises:
        NotInWorkerError: outside a training function.
    """
    checkpoint = polytrain.get_checkpoint()
    if checkpoint is None:
        return None
    return RayTrainReportCallback.get_model(checkpoint)
