"""Loads checkpoints of `torch.distributed.checkpoint` without running code in them.

torch reads their metadata, and values that aren't tensors, with `pickle`, which can run any code.
Here the metadata may contain only the classes that metadata needs, and other values are loaded
with `weights_only=True`.
"""

from __future__ import annotations

import enum
import io
import pickle
import re
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from polytrain_torch.private import SHARD_LIST_GLOBALS

METADATA_FILE = ".metadata"
_OF_PART = re.compile(r"shards-(\d+)\.metadata")
_MODEL = "model."

_ALLOWED = {
    *SHARD_LIST_GLOBALS,
    # Paths in the metadata. Python 3.13 has moved the class.
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
}


def metadata_file(rank: int) -> str:
    """Return the name of the metadata of a rank's own part; see `shard_copies`."""
    return f"shards-{rank}.metadata"


def data_file(rank: int) -> str:
    """Return the name that torch gives to a rank's shards."""
    return f"__{rank}_0.distcp"


def has_shards(directory: Path) -> bool:
    """Return whether a checkpoint has shards."""
    return (directory / METADATA_FILE).exists() or (directory / metadata_file(0)).exists()


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
        directory = Path(self.path)
        if (directory / METADATA_FILE).exists():
            metadata = _read(directory / METADATA_FILE)
        else:
            metadata = _joined(directory)
        if metadata.storage_meta is None:
            metadata.storage_meta = dcp.metadata.StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def _read(file: Path) -> Any:
    with file.open("rb") as opened:
        metadata = _MetadataUnpickler(opened).load()
    for info in metadata.storage_data.values():
        name = info.relative_path
        if name != Path(name).name:
            raise pickle.UnpicklingError(
                f"{file.name} names {name!r}, which isn't in the checkpoint's directory"
            )
    return metadata


def _joined(directory: Path) -> Any:
    """Return the metadata of all ranks' own parts, as torch writes it for all ranks at once."""
    items: dict[str, Any] = {}
    storage: dict[Any, Any] = {}
    keys: dict[str, Any] = {}
    for rank, metadata in _of_parts(directory):
        keys |= metadata.planner_data
        for name, item in metadata.state_dict_metadata.items():
            known = items.setdefault(name, item)
            if known is not item and isinstance(item, TensorStorageMetadata):
                there = {chunk.offsets for chunk in known.chunks}
                more = [chunk for chunk in item.chunks if chunk.offsets not in there]
                items[name] = replace(known, chunks=[*known.chunks, *more])
        for index, info in metadata.storage_data.items():
            storage.setdefault(index, replace(info, relative_path=data_file(rank)))
    return dcp.metadata.Metadata(items, planner_data=keys, storage_data=storage)


def _of_parts(directory: Path) -> Iterator[tuple[int, Any]]:
    """Yield the rank and the metadata of each part, by rank.

    Raises:
        FileNotFoundError: there is none.
    """
    names = (_OF_PART.fullmatch(file.name) for file in directory.iterdir())
    ranks = sorted(int(found[1]) for found in names if found is not None)
    if not ranks:
        raise FileNotFoundError(f"{directory} has no {METADATA_FILE}")
    for rank in ranks:
        yield rank, _read(directory / metadata_file(rank))


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _member
        raise pickle.UnpicklingError(
            f"{METADATA_FILE} names {module}.{name}, for which the list of a checkpoint's tensors "
            "has no use: it isn't loaded, because that could run what somebody else has written"
        )


def _member(kind: Any, name: Any) -> Any:
    """Return a member of an enum: early versions of Python 3.11 store it as a call of `getattr`."""
    if isinstance(kind, enum.EnumMeta) and name in kind.__members__:
        return kind[name]
    raise pickle.UnpicklingError(
        f"{METADATA_FILE} calls getattr({kind!r}, {name!r}), for which the list of a checkpoint's "
        "tensors has no use: it isn't loaded, because that could run what somebody else has written"
    )


class _SafePlanner(DefaultLoadPlanner):
    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        # torch loads it with weights_only=False: give it only what loads with True.
        safe = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), safe)
        safe.seek(0)
        super().load_bytes(read_item, safe)
