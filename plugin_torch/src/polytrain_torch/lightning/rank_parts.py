"""State that differs by rank, beside Lightning's checkpoints: Lightning saves only rank 0's."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from polytrain_torch.checkpoints.rank_parts import (
    Differences,
    States,
    comparable,
    found_beside,
    own_states,
    refuse_other_ranks,
    save_beside,
    states_of_all,
)
from polytrain_torch.checkpoints.safe_serialization import loaded, save_safely
from polytrain_torch.checkpoints.sharded_parts import is_consolidated
from polytrain_torch.libraries import needed
from polytrain_torch.models.parallel import unwrapped

with needed("lightning"):
    from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

    from polytrain_torch.lightning.private import accumulates

logger = logging.getLogger(__name__)

_CALLBACKS = "callbacks"
_GRADIENTS = "gradients"
_GRADIENTS_FILE = "gradients.pt"
"""File with rank 0's gradients, if the checkpoint is saved while they are added up."""


def save_rank_parts(trainer: Any, part: Path | None) -> None:
    """Write states that differ by rank. All ranks call this when rank 0 has saved.

    Args:
        trainer: Lightning's trainer.
        part: this rank's part of the checkpoint; None if it has none.
    """
    states: States = {
        kind: {name: unwrapped(each).state_dict() for name, each in objects.items()}
        for kind, objects in _objects(trainer).items()
    }
    gradients = _gradients(trainer)
    states[_GRADIENTS] = {_GRADIENTS: gradients}
    model = {
        name: comparable(trainer.model, state) for name, state in states.get("model", {}).items()
    }
    save_beside(states, {**states, "model": model}, part)
    if gradients and part is not None and dist.get_rank() == 0:
        save_safely(gradients, part / _GRADIENTS_FILE)


def restore_rank_parts(trainer: Any, directory: Path) -> None:
    """Load this rank's own states, after Lightning has loaded rank 0's.

    Raises:
        ValueError: another number of ranks has saved them, except callbacks, which begin with
            rank 0's, and gradients, which begin with the mean.
    """
    found = found_beside(directory) or {"ranks": dist.get_world_size(), "names": {}}
    if (directory / _GRADIENTS_FILE).exists():
        _restore_gradients(trainer.lightning_module, found, directory)
    names: Mapping[str, list[str]] = found["names"]
    apart = (_CALLBACKS, _GRADIENTS)
    refuse_other_ranks(
        [name for kind, differ in names.items() if kind not in apart for name in differ], found
    )
    if found["ranks"] != dist.get_world_size() and _CALLBACKS in names:
        logger.warning(
            "Each of the %d workers that made the checkpoint had other states of %s. The workers "
            "begin with those of rank 0. Where they monitor a metric, log it with sync_dist=True.",
            *(found["ranks"], ", ".join(names[_CALLBACKS])),
        )
    objects = _objects(trainer)
    for kind, states in own_states({kind: {} for kind in objects}, found, directory).items():
        for name, state in states.items():
            objects[kind][name].load_state_dict(state)


def _gradients(trainer: Any) -> dict[str, torch.Tensor]:
    """Return this rank's gradients that an optimizer hasn't used yet; other strategies shard them.

    With manual optimization nobody knows which those are.
    """
    module, strategy = trainer.lightning_module, trainer.strategy
    if not (module.automatic_optimization and accumulates(trainer)):
        return {}
    if not isinstance(strategy, DDPStrategy | SingleDeviceStrategy):
        if dist.get_rank() == 0:
            _warn_of_gradients(type(strategy).__name__)
        return {}
    named = module.named_parameters()
    return {name: each.grad for name, each in named if each.grad is not None}


@cache
def _warn_of_gradients(strategy: str) -> None:
    logger.warning(
        "A checkpoint is saved while gradients are added up (accumulate_grad_batches). With %s it "
        "doesn't have them, and a restart from it loses them. Save after an optimizer's step.",
        strategy,
    )


def _restore_gradients(module: Any, found: Differences, directory: Path) -> None:
    """Continue to add up gradients. Another number of ranks begins with their mean."""
    first = loaded(directory / _GRADIENTS_FILE)
    if found["ranks"] == dist.get_world_size():
        whole = own_states({_GRADIENTS: {_GRADIENTS: first}}, found, directory)
        gradients = whole[_GRADIENTS][_GRADIENTS]
    else:
        of_all = states_of_all(_GRADIENTS, _GRADIENTS, first, found, directory)
        gradients = {
            name: sum(each[name] for each in of_all if name in each) / len(of_all)
            for name in set().union(*of_all)
        }
    for name, parameter in module.named_parameters():
        if name in gradients:
            parameter.grad = gradients[name].to(parameter.device)


def _objects(trainer: Any) -> dict[str, dict[str, Any]]:
    """Return kind → name → object, for objects whose state only rank 0 saves."""
    by_kind: dict[str, dict[str, Any]] = {
        _CALLBACKS: {each.state_key: each for each in trainer.callbacks},
        "schedulers": {
            f"{type(each.scheduler).__name__} {number}": each.scheduler
            for number, each in enumerate(trainer.lr_scheduler_configs)
        },
    }
    if trainer.datamodule is not None:
        by_kind["data"] = {type(trainer.datamodule).__name__: trainer.datamodule}
    # Other strategies shard the model.
    if isinstance(trainer.strategy, DDPStrategy):
        module = trainer.lightning_module
        by_kind["model"] = {type(module).__name__: module}
        by_kind["optimizers"] = {
            f"{type(each).__name__} {number}": each
            for number, each in enumerate(trainer.optimizers)
            # Lightning gathers the whole state of others on rank 0.
            if not is_consolidated(unwrapped(each))
        }
    return by_kind
