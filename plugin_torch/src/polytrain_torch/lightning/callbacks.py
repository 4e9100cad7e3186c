"""Restores what Lightning's own callbacks have found or changed, where its checkpoints lack it.

A finder's search must start from a run's initial weights. A restart has trained weights, and loader
positions that a search would move, so it takes the results from the checkpoint. In the middle of an
epoch Lightning doesn't call the hooks with which callbacks begin it.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from polytrain import CheckpointConsistencyMode, get_all_reported_checkpoints
from polytrain_torch.libraries import needed

with needed("lightning"):
    from lightning.pytorch.callbacks import (
        BatchSizeFinder,
        Callback,
        GradientAccumulationScheduler,
        LearningRateFinder,
        ModelPruning,
        SpikeDetection,
        StochasticWeightAveraging,
    )
    from lightning.pytorch.utilities.parsing import lightning_setattr

    from polytrain_torch.lightning.private import (
        found_rate,
        is_search_alone,
        rate_attribute,
        sets_rate,
        size_attribute,
    )

logger = logging.getLogger(__name__)

_FOUND = "found.json"
"""File that maps each finder's class to its result."""

_TRAINED = "trained.json"
"""File that maps each parameter's name to whether it is trained."""


def is_search(callbacks: Iterable[Any]) -> bool:
    """Whether a `fit` is a search by `Tuner`, and ends with it."""
    return any(is_search_alone(each) for each in _finders(callbacks))


def save_found(callbacks: Iterable[Any], directory: Path) -> None:
    """Write the results of a trainer's finders beside its checkpoint."""
    found = {type(each).__name__: _result(each) for each in _finders(callbacks)}
    if found:
        (directory / _FOUND).write_text(json.dumps(found))


def take_over_found(callbacks: Iterable[Any], checkpoint: Path | None) -> Callable[[], None]:
    """Have finders take their results from a checkpoint, if there is one, instead of searching.

    Returns:
        A function that lets them search again.

    Raises:
        ValueError: a finder searches during training, or has no result in the checkpoint.
    """
    finders = _finders(callbacks)
    for each in finders:
        _refuse_during_training(each)
    if checkpoint is None:
        return lambda: None
    file = checkpoint / _FOUND
    found = json.loads(file.read_text()) if file.exists() else {}
    for each in finders:
        name = type(each).__name__
        if name not in found:
            raise ValueError(
                f"{name}: the checkpoint from which this fit resumes has no result of it, and it "
                f"can't search from trained weights. Leave {name} out."
            )
        if isinstance(each, LearningRateFinder):
            each.lr_find = partial(_take_over_rate, each, found[name])
        else:
            each.scale_batch_size = partial(_take_over_size, each, found[name])

    def search_again() -> None:
        for each in finders:
            vars(each).pop("lr_find", None)
            vars(each).pop("scale_batch_size", None)

    return search_again


def _finders(callbacks: Iterable[Any]) -> list[Any]:
    return [each for each in callbacks if isinstance(each, LearningRateFinder | BatchSizeFinder)]


def _refuse_during_training(finder: Any) -> None:
    hooks = [name for name in dir(Callback) if name.startswith("on_train_")]
    for hook in hooks:
        if getattr(type(finder), hook) is not getattr(Callback, hook):
            name = type(finder).__name__
            raise ValueError(
                f"{name}.{hook}: a restart couldn't repeat a search during training. Let {name} "
                "search in on_fit_start, as Lightning's finders do, or give each search its own "
                "run."
            )


def _result(finder: Any) -> Any:
    if isinstance(finder, BatchSizeFinder):
        return finder.optimal_batch_size
    return None if finder.optimal_lr is None else finder.optimal_lr.results


def _take_over_rate(finder: Any, results: Any, trainer: Any, module: Any) -> None:
    """Set the module's attribute. The optimizer restores its rate from its own state."""
    finder.optimal_lr = found_rate(finder, results)
    rate = finder.optimal_lr.suggestion() if sets_rate(finder) else None
    if rate is not None:
        lightning_setattr(module, rate_attribute(finder, module), rate)


def _take_over_size(finder: Any, size: int, trainer: Any, module: Any) -> None:
    finder.optimal_batch_size = size
    lightning_setattr(module, size_attribute(finder), size)


def save_trained(trainer: Any, directory: Path) -> None:
    """Write which parameters are trained: callbacks may freeze and unfreeze them."""
    named = trainer.lightning_module.named_parameters()
    is_trained = {name: parameter.requires_grad for name, parameter in named}
    (directory / _TRAINED).write_text(json.dumps(is_trained))


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


def saves_config(callback: Any) -> bool:
    """Whether a callback is the one with which `LightningCLI` saves its configuration."""
    # Whoever has one has imported its module, which takes a while.
    cli = sys.modules.get("lightning.pytorch.cli")
    return isinstance(callback, getattr(cli, "SaveConfigCallback", ()))


def save_config_again(callbacks: Iterable[Any], *, is_own_directory: bool) -> None:
    """Have `LightningCLI` save its configuration again after a restart, instead of refusing to.

    Args:
        callbacks: a trainer's callbacks.
        is_own_directory: whether the trainer's directory is named after the run.
    """
    for each in callbacks:
        # Another directory may have another run's configuration, until this one has trained there.
        if saves_config(each) and (
            is_own_directory or get_all_reported_checkpoints(CheckpointConsistencyMode.COMMITTED)
        ):
            each.overwrite = True


def resume_epoch(trainer: Any, checkpoint: Path) -> None:
    """Restore callbacks and frozen parameters to their state in a checkpoint's epoch.

    Args:
        trainer: Lightning's trainer, after its hooks at the start of training.
        checkpoint: the checkpoint's directory.
    """
    file = checkpoint / _TRAINED
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
