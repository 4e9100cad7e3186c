"""Checks what Lightning saves first, so that what no restart could load is told at once."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from polytrain_torch.read_back import Load, try_all


def refuse_unsafe(saved: Path) -> None:
    """Raise an error at the save, not only when a restart loads the file."""
    if not saved.is_file():
        return
    unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(saved)
    if unsafe:
        raise TypeError(
            f"The checkpoint holds {', '.join(sorted(unsafe))}, which isn't plain data: a restart "
            "couldn't load it (weights_only). Leave it out, for example with "
            "save_hyperparameters(ignore=[…]), allow it with torch.serialization.add_safe_globals, "
            "or trust the run's checkpoints: fit(…, weights_only=False)."
        )


def read_back(saved: Path, trainer: Any) -> None:
    """Try to load the module's weights, the optimizers and their schedulers, as a restart would."""
    if not saved.is_file():
        return
    states = torch.load(saved, weights_only=True, map_location="cpu", mmap=True)
    module, schedules = trainer.lightning_module, trainer.lr_scheduler_configs
    parts = [*trainer.optimizers, *(each.scheduler for each in schedules)]
    of_parts = [*states["optimizer_states"], *states["lr_schedulers"]]
    load = partial(_load_module, states["state_dict"], strict=module.strict_loading)
    # A sharded optimizer is loaded by all ranks together.
    loads = zip(parts, map(_load_state, of_parts), strict=True) if _is_whole(module) else ()
    try_all([(module, load), *loads])


def _load_module(state: Any, copied: Any, *, strict: bool) -> None:
    copied.load_state_dict(state, strict=strict)


def _load_state(state: Any) -> Load:
    return lambda copied: copied.load_state_dict(state)


def _is_whole(module: torch.nn.Module) -> bool:
    return not any(isinstance(each, DTensor) for each in module.parameters())
