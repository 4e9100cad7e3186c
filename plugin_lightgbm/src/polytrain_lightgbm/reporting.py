"""Reports and checkpoints for training functions that call `lightgbm.train`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightgbm
from lightgbm.callback import CallbackEnv

import polytrain
from polytrain.boosting.reported_metrics import ReportedMetrics
from polytrain.boosting.round_reports import RoundReports
from polytrain_lightgbm.engine import MODEL_FILE


class ReportCallback:
    """Reports metrics after every round, and a checkpoint at an interval and at the end."""

    order = 40
    before_iteration = False

    def __init__(self, *, checkpoint_frequency: int = 0) -> None:
        """
        Args:
            checkpoint_frequency: rounds between two checkpoints; 0 for none but the last.
        """
        self._reports = RoundReports(filename=MODEL_FILE, frequency=checkpoint_frequency)

    def __call__(self, env: CallbackEnv) -> None:
        measured = {
            f"{result.dataset_name}-{result.metric_name}": float(result.metric_value)
            for result in env.evaluation_result_list or []
        }
        round_ = env.iteration + 1
        self._reports.report(
            round_,
            measured,
            is_last=round_ == env.end_iteration,
            save=lambda file: env.model.save_model(file, num_iteration=-1),
        )


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
            metrics: names such as "valid-l2", or reported names to such names; all by default.
            filename: the model's file in a checkpoint. `Result.load_model` reads "model.txt".
            frequency: rounds between two checkpoints; 0 for none before the end.
            checkpoint_at_end: whether the last round has a checkpoint.
            results_postprocessing_fn: applied to the metrics of a round; what it returns is
                reported.
        """
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
    ) -> lightgbm.Booster:
        """Return the model of a checkpoint.

        Args:
            checkpoint: one that this callback has reported.
            filename: as for the callback.
        """
        with checkpoint.as_directory() as directory:
            return lightgbm.Booster(model_file=Path(directory, filename))


def checkpointed_model() -> lightgbm.Booster | None:
    """The checkpoint's model to resume from, for `lightgbm.train(init_model=…)`; None at first.

    Raises:
        NotInWorkerError: outside a training function.
    """
    checkpoint = polytrain.get_checkpoint()
    if checkpoint is None:
        return None
    return RayTrainReportCallback.get_model(checkpoint)
