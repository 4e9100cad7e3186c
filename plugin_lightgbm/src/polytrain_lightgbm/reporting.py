"""Reports and checkpoints for training functions that call `lightgbm.train`."""

from __future__ import annotations

from pathlib import Path

import lightgbm
from lightgbm.callback import CallbackEnv

from polytrain.boosting import report_callbacks
from polytrain.boosting.report_callbacks import RayTrainReporter, RoundReporter
from polytrain_lightgbm.engine import MODEL_FILE


class ReportCallback(RoundReporter):
    """Reports metrics after every round, and a checkpoint at an interval and at the end.

    With `lightgbm.early_stopping`, set `checkpoint_frequency`: LightGBM tells no callback that it
    stops early, so that the last rounds may have no checkpoint.
    """

    CHECKPOINT_NAME = MODEL_FILE

    def __call__(self, env: CallbackEnv) -> None:
        measured = {
            f"{result.dataset_name}-{result.metric_name}": float(result.metric_value)
            for result in env.evaluation_result_list or []
        }
        round_ = env.iteration + 1
        self._report(
            round_,
            measured,
            is_last=round_ == env.end_iteration,
            save=lambda file: env.model.save_model(file, num_iteration=-1),
        )


class RayTrainReportCallback(RayTrainReporter, ReportCallback):
    """Reports like `ReportCallback`, with the arguments of Ray Train's callback of this name."""

    @staticmethod
    def read_model(path: Path) -> lightgbm.Booster:
        return lightgbm.Booster(model_file=path)


def checkpointed_model() -> lightgbm.Booster | None:
    """Return the checkpoint's model, for `lightgbm.train(init_model=…)`; None without a checkpoint.

    Raises:
        NotInWorkerError: outside a training function.
    """
    return report_callbacks.checkpointed_model(RayTrainReportCallback)
