"""Accelerate in a training function: `Accelerator()` finds its workers by itself.

Its `save_state` and `load_state` are the run's checkpoints by these two calls:

    done = restore(accelerator)
    for epoch in range(done.get("epoch", 0), 10):
        ...
        report(accelerator, {"loss": loss}, epoch=epoch + 1)
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polytrain
from polytrain import Checkpoint, get_checkpoint
from polytrain_torch.checkpoint_parts import checkpoint_of, directory_of_all, part_of
from polytrain_torch.libraries import needed
from polytrain_torch.safe_serialization import loaded, save_safely

with needed("accelerate"):
    from accelerate import Accelerator

_PROGRESS_FILE = "progress.pt"


def restore(accelerator: Accelerator, checkpoint: Checkpoint | None = None) -> dict[str, Any]:
    """Load what the attempt resumes from into all that was prepared. All ranks call this.

    Args:
        accelerator: after `prepare`.
        checkpoint: another one than that.

    Returns:
        What `report` was given besides the metrics. Nothing, if training starts.

    Raises:
        ValueError: it names its checkpoints itself.
    """
    _refuse_own_names(accelerator)
    checkpoint = checkpoint or get_checkpoint()
    if checkpoint is None:
        return {}
    accelerator.load_state(checkpoint.path)
    progress: dict[str, Any] = loaded(Path(checkpoint.path, _PROGRESS_FILE))
    return progress


def report(accelerator: Accelerator, metrics: Mapping[str, Any], **progress: Any) -> None:
    """Report metrics with a checkpoint of all that was prepared. All ranks call this.

    Args:
        accelerator: whose state is saved, the random numbers of every rank included.
        metrics: as for `polytrain.report`.
        progress: plain data for `restore` to give back, such as the next epoch's number.

    Raises:
        ValueError: it names its checkpoints itself.
        TypeError: if some of it is no plain data, and couldn't be loaded safely.
    """
    _refuse_own_names(accelerator)
    with directory_of_all() as directory:
        accelerator.save_state(str(directory))
        if accelerator.is_main_process:
            save_safely(progress, directory / _PROGRESS_FILE)
        with part_of(directory) as part:
            polytrain.report(metrics, checkpoint_of(part))


def _refuse_own_names(accelerator: Accelerator) -> None:
    if accelerator.project_configuration.automatic_checkpoint_naming:
        raise ValueError(
            "automatic_checkpoint_naming: Accelerate would save elsewhere than in the run's "
            "checkpoint. Leave it out; RunConfig(checkpoint_config=…) says which are kept."
        )
