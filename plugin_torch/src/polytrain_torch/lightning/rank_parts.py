"""State that differs by rank, beside Lightning's checkpoints: Lightning saves only rank 0's."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from polytrain_torch.checkpoints.rank_parts import (
    States,
    comparable,
    found_beside,
    own_states,
    refuse_other_ranks,
    save_beside,
)
from polytrain_torch.checkpoints.sharded_parts import is_consolidated
from polytrain_torch.libraries import needed
from polytrain_torch.models.parallel import unwrapped

with needed("lightning"):
    from lightning.pytorch.strategies import DDPStrategy

logger = logging.getLogger(__name__)

_CALLBACKS = "callbacks"


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
    model = {
        name: comparable(trainer.model, state) for name, state in states.get("model", {}).items()
    }
    save_beside(states, {**states, "model": model}, part)


def restore_rank_parts(trainer: Any, directory: Path) -> None:
    """Load this rank's own states, after Lightning has loaded rank 0's.

    Raises:
        ValueError: another number of ranks has saved them. Callbacks keep rank 0's instead.
    """
    found = found_beside(directory)
    if found is None:
        return
    names: Mapping[str, list[str]] = found["names"]
    refuse_other_ranks(
        [name for kind, differ in names.items() if kind != _CALLBACKS for name in differ], found
    )
    if found["ranks"] != dist.get_world_size():
        logger.warning(
            "Each of the %d workers that made the checkpoint had other states of %s. The workers "
            "begin with those of rank 0. Where they monitor a metric, log it with sync_dist=True.",
            *(found["ranks"], ", ".join(names[_CALLBACKS])),
        )
    objects = _objects(trainer)
    for kind, states in own_states({kind: {} for kind in objects}, found, directory).items():
        for name, state in states.items():
            objects[kind][name].load_state_dict(state)


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
