"""Accelerate in a training function: `Accelerator()` finds its workers by itself.

With these two calls its `save_state` and `load_state` use the run's checkpoints:

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
from polytrain_torch.engine import unwrapped
from polytrain_torch.frozen import keep_frozen, wraps_in_ddp
from polytrain_torch.libraries import needed
from polytrain_torch.safe_serialization import loaded, save_safely

with needed("accelerate"):
    from accelerate import Accelerator

_PROGRESS_FILE = "progress.pt"

_UNFREEZE_BEFORE = (
    "Freeze them after accelerator.prepare, with "
    "DistributedDataParallelKwargs(find_unused_parameters=True)."
)


def restore(accelerator: Accelerator, checkpoint: Checkpoint | None = None) -> dict[str, Any]:
    """Load the attempt's checkpoint into all prepared objects. All ranks call this.

    Args:
        accelerator: after `prepare`.
        checkpoint: load this one instead.

    Returns:
        The `progress` that `report` got. Empty if training starts.

    Raises:
        ValueError: `automatic_checkpoint_naming` is set.
    """
    _refuse_own_names(accelerator)
    if wraps_in_ddp(accelerator):
        for model in accelerator._models:
            keep_frozen(unwrapped(model), wrapped_by="prepare", remedy=_UNFREEZE_BEFORE)
    checkpoint = checkpoint or get_checkpoint()
    if checkpoint is None:
        return {}
    accelerator.load_state(checkpoint.path)
    progress: dict[str, Any] = loaded(Path(checkpoint.path, _PROGRESS_FILE))
    return progress


def report(accelerator: Accelerator, metrics: Mapping[str, Any], **progress: Any) -> None:
    """Report metrics with a checkpoint of all prepared objects. All ranks call this.

    Args:
        accelerator: whose state is saved, the random numbers of every rank included.
        metrics: as for `polytrain.report`.
        progress: plain data, which `restore` returns, such as the next epoch's number.

    Raises:
        ValueError: `automatic_checkpoint_naming` is set.
        TypeError: if a value isn't plain data, and couldn't be loaded safely.
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
            "automatic_checkpoint_naming: Accelerate would save outside of the run's checkpoint. "
            "Leave it out; RunConfig(checkpoint_config=…) says which checkpoints are kept."
        )
