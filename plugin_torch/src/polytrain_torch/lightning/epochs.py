"""Resumes callbacks in the middle of an epoch: Lightning doesn't call their epoch-start hooks."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from polytrain_torch.libraries import needed

with needed("lightning"):
    from lightning.pytorch.callbacks import (
        GradientAccumulationScheduler,
        ModelPruning,
        SpikeDetection,
        StochasticWeightAveraging,
    )

logger = logging.getLogger(__name__)

_FILE = "trained.json"
"""File that maps each parameter's name to whether it is trained."""


def save_trained(trainer: Any, directory: Path) -> None:
    """Write which parameters are trained: callbacks may freeze and unfreeze them."""
    named = trainer.lightning_module.named_parameters()
    is_trained = {name: parameter.requires_grad for name, parameter in named}
    (directory / _FILE).write_text(json.dumps(is_trained))


def prepare_callbacks(callbacks: list[Any]) -> None:
    """Make callbacks able to load their states; warn if one's state isn't saved."""
    for each in callbacks:
        if isinstance(each, ModelPruning):
            logger.warning(
                "ModelPruning: Lightning doesn't save which weights are pruned, and trains them "
                "again after a restart until it prunes next. The weights at the end differ after a "
                "restart. If they may not, set FailureConfig(max_failures=0)."
            )
        # SpikeDetection loads its running mean under this name.
        if isinstance(each, SpikeDetection) and not hasattr(each, "running"):
            each.running = each.running_mean


def resume_epoch(trainer: Any, checkpoint: Path) -> None:
    """Restore callbacks and frozen parameters to their state in a checkpoint's epoch.

    Args:
        trainer: Lightning's trainer, after its hooks at the start of training.
        checkpoint: the checkpoint's directory.
    """
    file = checkpoint / _FILE
    is_trained = json.loads(file.read_text()) if file.exists() else {}
    for name, parameter in trainer.lightning_module.named_parameters():
        if is_trained.get(name, parameter.requires_grad) != parameter.requires_grad:
            parameter.requires_grad_(not parameter.requires_grad)
    loop = trainer.fit_loop
    if not loop.restarted_mid_epoch:
        return
    if loop.epoch_progress.current.processed == loop.epoch_progress.current.started:
        # It was saved at an epoch's last step: the next epoch begins, with all its hooks.
        loop.reset_restart_stage()
        return
    for each in trainer.callbacks:
        if isinstance(each, GradientAccumulationScheduler):
            each.on_train_epoch_start(trainer)
        elif isinstance(each, StochasticWeightAveraging):
            _resume_averaging(each, trainer)


def _resume_averaging(callback: Any, trainer: Any) -> None:
    """Create the callback's schedule, but keep the optimizer options of the checkpoint."""
    groups = [group for each in trainer.optimizers for group in each.param_groups]
    rates = [{name: each for name, each in group.items() if name != "params"} for group in groups]
    callback.on_train_epoch_start(trainer, trainer.lightning_module)
    for group, saved in zip(groups, rates, strict=True):
        group.update(saved)
