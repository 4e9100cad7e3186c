"""The best model's files for a trainer that resumes where its output directory is gone.

`load_best_model_at_end` reads the best model from a directory below `output_dir`, whose path is in
the trainer's state. On another machine, or after a clean-up, only the run's checkpoints have it.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from transformers.trainer_callback import TrainerState

from polytrain import CheckpointConsistencyMode, get_all_reported_checkpoints, get_context
from polytrain_torch.checkpoints.parts import copy_whole
from polytrain_torch.collectives.gathering import gathered

logger = logging.getLogger(__name__)

_STATE = "trainer_state.json"


def restore_best(resumed: Path, args: Any, *, files_in: str) -> Path | None:
    """Copy the best model's checkpoint to the trainer's output directory, if it isn't there.

    All ranks call this.

    Args:
        resumed: directory of the trainer's files that it resumes from.
        args: its `TrainingArguments`.
        files_in: directory of a trainer's files in the run's checkpoints; empty for these.

    Returns:
        the best model's directory on this node; None if there is none.
    """
    context = get_context()
    found = None
    if context.get_local_rank() == 0 and args.load_best_model_at_end:
        found = _found(resumed / _STATE, args, files_in)
    node = context.get_node_rank()
    # The other ranks of a node read the same directory.
    return next((best for its, best in gathered((node, found)) if best and its == node), None)


def _found(file: Path, args: Any, files_in: str) -> Path | None:
    """Return the best model's directory on this node, copied if need be."""
    state = TrainerState.load_from_json(str(file)) if file.exists() else TrainerState()
    if state.best_model_checkpoint is None:
        return None
    recorded = Path(state.best_model_checkpoint)
    if recorded.is_dir():
        return recorded
    step = int(recorded.name.rpartition("-")[2])
    metric = f"eval_{args.metric_for_best_model.removeprefix('eval_')}"
    for reported in get_all_reported_checkpoints(CheckpointConsistencyMode.COMMITTED):
        # Only those that may be it are fetched.
        if reported.metrics.get(metric) == state.best_metric:
            with reported.checkpoint.as_directory() as directory:
                files = Path(directory, files_in)
                if json.loads((files / _STATE).read_text())["global_step"] == step:
                    return copy_whole(files, Path(args.output_dir, recorded.name))
    logger.warning(
        "The best model so far, of step %d, is lost: %s is gone, and none of the run's checkpoints "
        "has it. At the end the best of the following steps is loaded if it is better, otherwise "
        "the last. Use an output_dir that outlives the workers, or "
        "CheckpointConfig(num_to_keep=…, checkpoint_score_attribute='%s').",
        step,
        recorded,
        metric,
    )
    return None
