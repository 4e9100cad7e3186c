"""PyTorch on polytrain: a process group for every attempt, DDP, and data loaders split by rank.

Importing this package imports no torch; calling its helpers does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polytrain_plugins import Backend, hookimpl
from polytrain_torch.backend import Torch

if TYPE_CHECKING:
    from polytrain_torch.checkpoints.training_state import TrainingState
    from polytrain_torch.loaders.prepared import PreparedDataLoader
    from polytrain_torch.models.prepare import (
        get_device,
        get_devices,
        prepare_data_loader,
        prepare_model,
    )
    from polytrain_torch.randomness import enable_reproducibility, seed_everything
    from polytrain_torch.row_weights import weigh_rows
    from polytrain_torch.shard import TorchShard
    from polytrain_torch.virtual_workers import micro_batches

__all__ = [
    "PreparedDataLoader",
    "Torch",
    "TorchShard",
    "TrainingState",
    "enable_reproducibility",
    "get_device",
    "get_devices",
    "micro_batches",
    "prepare_data_loader",
    "prepare_model",
    "seed_everything",
    "weigh_rows",
]

_HOMES = {
    "PreparedDataLoader": "loaders.prepared",
    "TorchShard": "shard",
    "enable_reproducibility": "randomness",
    "get_device": "models.prepare",
    "get_devices": "models.prepare",
    "micro_batches": "virtual_workers",
    "prepare_data_loader": "models.prepare",
    "prepare_model": "models.prepare",
    "seed_everything": "randomness",
    "TrainingState": "checkpoints.training_state",
    "weigh_rows": "row_weights",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


@hookimpl
def polytrain_backends() -> list[type[Backend]]:
    """Return the backends that this package's entry point provides."""
    return [Torch]
