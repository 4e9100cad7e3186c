"""Reports and checkpoints for training functions that call `lightgbm.train`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightgbm
from lightgbm.callback import CallbackEnv

import polytrain
from polytrain.boosting.reported_metrics import ReportedMetrics
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
        self._frequency = checkpoint_frequency
        self._at_end = True
        self._filename = MODEL_FILE
        self._reported = ReportedMetrics()

    def __call__(self, env: CallbackEnv) -> None:
        measured = {
            f"{result.dataset_name}-{result.metric_name}": float(result.metric_value)
            for result in env.evaluation_result_list or []
        }
        metrics = self._reported.of(measured)
        round_ = env.iteration + 1
        is_due = self._frequency > 0 and round_ % self._frequency == 0
        is_last = round_ == env.end_iteration
        is_saved = is_due or (is_last and self._at_end)
        if polytrain.get_context().get_world_rank() > 0 or not is_saved:
            polytrain.report(metrics)
            return
        with tempfile.TemporaryDirectory() as directory:
            env.model.save_model(Path(directory, self._filename), num_iteration=-1)
            polytrain.report(metrics, checkpoint=polytrain.Checkpoint.from_directory(directory))


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
        super().__init__(checkpoint_frequency=frequency)
        self._at_end = checkpoint_at_end
        self._filename = filename
        self._reported = ReportedMetrics(
            metrics=metrics, results_postprocessing_fn=results_postprocessing_fn
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
    with checkpoint.as_directory() as directory:
        return lightgbm.Booster(model_file=Path(directory, MODEL_FILE))
