"""Checkpoints of `torch.distributed.checkpoint`, loaded without running what is in them.

torch reads their list of tensors, and whatever isn't a tensor, by `pickle`, which calls what a file
names. Here the list may name only what such lists consist of, and everything else is loaded with
`weights_only=True`.
"""

from __future__ import annotations

import io
import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from polytrain_torch.private import SHARD_LIST_GLOBALS

METADATA_FILE = ".metadata"
_MODEL = "model."

_ALLOWED = {
    *SHARD_LIST_GLOBALS,
    # Where the checkpoint was written. Python 3.13 has moved the class.
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
}


def load_sharded(states: dict[str, Any], directory: Path) -> None:
    """Load a checkpoint into what is there now, which may be sharded otherwise.

    All ranks call this, or a process that has no process group.

    Raises:
        pickle.UnpicklingError: it holds what would be run, or leads out of the directory. Where
            there are ranks, torch raises its own error, which holds this one.
    """
    with warnings.catch_warnings():
        # It takes the lack of a process group for a mistake.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(states, storage_reader=SafeReader(directory), planner=_SafePlanner())


def whole_model(directory: Path) -> dict[str, torch.Tensor]:
    """The weights of the part called "model", put together on the CPU by this process alone."""
    known = SafeReader(directory).read_metadata().state_dict_metadata
    weights = {
        name: torch.empty(tensor.size, dtype=tensor.properties.dtype)
        for name, tensor in known.items()
        if name.startswith(_MODEL) and isinstance(tensor, TensorStorageMetadata)
    }
    load_sharded(weights, directory)
    return {name.removeprefix(_MODEL): tensor for name, tensor in weights.items()}


class SafeReader(dcp.FileSystemReader):
    """Reads a checkpoint whose list of tensors anybody may have written."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        with (Path(self.path) / METADATA_FILE).open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        for info in metadata.storage_data.values():
            name = info.relative_path
            if name != Path(name).name:
                raise pickle.UnpicklingError(
                    f"{METADATA_FILE} names {name!r}, which isn't in the checkpoint's directory"
                )
        if metadata.storage_meta is None:
            metadata.storage_meta = dcp.metadata.StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _ALLOWED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(
            f"{METADATA_FILE} names {module}.{name}, for which the list of a checkpoint's tensors "
            "has no use: it isn't loaded, because that could run what somebody else has written"
        )


class _SafePlanner(DefaultLoadPlanner):
    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        # torch would load it with weights_only=False: that may have what is safe.
        safe = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), safe)
        safe.seek(0)
        super().load_bytes(read_item, safe)
