"""Loads checkpoints of `torch.distributed.checkpoint` without running code in them.

torch reads their metadata, and values that aren't tensors, with `pickle`, which can run any code.
Here the metadata may contain only the classes that metadata needs, and other values are loaded
with `weights_only=True`.
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
    # Paths in the metadata. Python 3.13 has moved the class.
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
}


def load_sharded(states: dict[str, Any], directory: Path) -> None:
    """Load a checkpoint into `states`, in place. They may be sharded differently.

    All ranks call this, or a process that has no process group.

    Raises:
        pickle.UnpicklingError: the metadata could run code, or names a file outside the directory.
            With a process group, torch raises its own error, which contains this one.
    """
    with warnings.catch_warnings():
        # torch warns if there is no process group.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(states, storage_reader=SafeReader(directory), planner=_SafePlanner())


def whole_model(directory: Path) -> dict[str, torch.Tensor]:
    """Return the unsharded weights of the part "model", on the CPU, without other ranks."""
    known = SafeReader(directory).read_metadata().state_dict_metadata
    weights = {
        name: torch.empty(tensor.size, dtype=tensor.properties.dtype)
        for name, tensor in known.items()
        if name.startswith(_MODEL) and isinstance(tensor, TensorStorageMetadata)
    }
    load_sharded(weights, directory)
    return {name.removeprefix(_MODEL): tensor for name, tensor in weights.items()}


class SafeReader(dcp.FileSystemReader):
    """Reads a checkpoint's metadata, which may come from an untrusted source."""

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
        # torch loads it with weights_only=False: give it only what loads with True.
        safe = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), safe)
        safe.seek(0)
        super().load_bytes(read_item, safe)
