"""Loads Lightning's first checkpoint on trial, so that a run fails early if no restart could."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.utils import prune

from polytrain_torch.checkpoints.read_back import Load, try_all, try_shards
from polytrain_torch.checkpoints.sharded_parts import is_sharded

_BESIDE_SHARDS = "meta.pt"
"""File in a directory of shards, with everything but the shards."""


def refuse_unsafe(saved: Path) -> None:
    """Refuse a file that a restart couldn't load safely.

    Raises:
        TypeError: it has more than plain data.
    """
    file = _file_of(saved)
    if not file.is_file():
        return
    unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    if unsafe:
        raise TypeError(
            f"The checkpoint holds {', '.join(sorted(unsafe))}, which isn't plain data: a restart "
            "couldn't load it (weights_only). Leave it out, for example with "
            "save_hyperparameters(ignore=[…]), allow it with torch.serialization.add_safe_globals, "
            "or trust the run's checkpoints: fit(…, weights_only=False)."
        )


def read_back(saved: Path, trainer: Any) -> None:
    """Load weights, optimizers and schedulers into copies, as a restart would.

    Raises:
        CheckpointError: one of them can't be loaded.
    """
    file = _file_of(saved)
    if not file.is_file():
        return
    states = torch.load(file, weights_only=True, map_location="cpu", mmap=True)
    module = trainer.lightning_module
    schedulers = [each.scheduler for each in trainer.lr_scheduler_configs]
    loads = [*zip(schedulers, map(_load_state, states["lr_schedulers"]), strict=True)]
    if is_sharded(module):
        try_shards(module, trainer.optimizers)
    if is_sharded(module) or _is_flat(trainer.model):
        try_all(loads)
        return
    load = partial(_load_module, states["state_dict"], strict=module.strict_loading)
    optimizers = zip(trainer.optimizers, map(_load_state, states["optimizer_states"]), strict=True)
    try_all([(module, load), *optimizers, *loads])


def _file_of(saved: Path) -> Path:
    return saved / _BESIDE_SHARDS if saved.is_dir() else saved


def _load_module(state: Any, copied: Any, *, strict: bool) -> None:
    _restore_pruned(copied)
    copied.load_state_dict(state, strict=strict)


def _restore_pruned(module: torch.nn.Module) -> None:
    """Restore the names of pruned parameters: a restart loads into a module without masks."""
    for each in module.modules():
        parameters = dict(each.named_parameters(recurse=False))
        for mask, _ in [*each.named_buffers(recurse=False)]:
            name = mask.removesuffix("_mask")
            if name != mask and f"{name}_orig" in parameters:
                prune.remove(each, name)


def _load_state(state: Any) -> Load:
    return lambda copied: copied.load_state_dict(state)


def _is_flat(model: torch.nn.Module) -> bool:
    """Whether FSDP1 wraps the model. Only all ranks together can load its weights."""
    return any(isinstance(each, FullyShardedDataParallel) for each in model.modules())
