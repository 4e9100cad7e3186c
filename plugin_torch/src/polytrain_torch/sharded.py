"""Checkpoints of `torch.distributed.checkpoint`: a part from every rank."""

from __future__ import annotations

from pathlib import Path

import torch

_MODEL = "model."


def is_sharded(directory: Path) -> bool:
    """Whether a directory holds such a checkpoint."""
    return (directory / ".metadata").exists()


def whole_model(directory: Path) -> dict[str, torch.Tensor]:
    """The weights of the part called "model", put together on the CPU by this process alone."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from polytrain_torch.safe_sharded import SafeReader, load_sharded

    known = SafeReader(directory).read_metadata().state_dict_metadata
    weights = {
        name: torch.empty(tensor.size, dtype=tensor.properties.dtype)
        for name, tensor in known.items()
        if name.startswith(_MODEL) and isinstance(tensor, TensorStorageMetadata)
    }
    load_sharded(weights, directory)
    return {name.removeprefix(_MODEL): tensor for name, tensor in weights.items()}
