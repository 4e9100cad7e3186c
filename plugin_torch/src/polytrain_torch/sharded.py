"""Checkpoints of `torch.distributed.checkpoint`: a part from every rank."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch

_METADATA = ".metadata"
_MODEL = "model."


def is_sharded(directory: Path) -> bool:
    """Whether a directory holds such a checkpoint."""
    return (directory / _METADATA).exists()


def whole_model(directory: Path) -> dict[str, torch.Tensor]:
    """The weights of the part called "model", put together on the CPU by this process alone."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    known = dcp.FileSystemReader(directory).read_metadata().state_dict_metadata
    weights = {
        name: torch.empty(tensor.size, dtype=tensor.properties.dtype)
        for name, tensor in known.items()
        if name.startswith(_MODEL) and isinstance(tensor, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        # It takes the lack of a process group for a mistake.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(weights, checkpoint_id=directory, no_dist=True)
    return {name.removeprefix(_MODEL): tensor for name, tensor in weights.items()}
