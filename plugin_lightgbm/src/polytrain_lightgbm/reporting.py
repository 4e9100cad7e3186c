"""Reports and checkpoints for training functions that call `lightgbm.train`."""

from __future__ import annotations

import tempfile
from pathlib import Path

import lightgbm
from lightgbm.callback import CallbackEnv

import polytrain
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

    def __call__(self, env: CallbackEnv) -> None:
        metrics = {
            f"{result.dataset_name}-{result.metric_name}": float(result.metric_value)
            for result in env.evaluation_result_list or []
        }
        round_ = env.iteration + 1
        is_due = self._frequency > 0 and round_ % self._frequency == 0
        is_last = round_ == env.end_iteration
        if polytrain.get_context().get_world_rank() > 0 or not (is_due or is_last):
            polytrain.report(metrics)
            return
        with tempfile.TemporaryDirectory() as directory:
            env.model.save_model(Path(directory, MODEL_FILE), num_iteration=-1)
            polytrain.report(metrics, checkpoint=polytrain.Checkpoint.from_directory(directory))


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
