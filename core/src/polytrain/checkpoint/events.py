"""How a checkpoint comes to be: parts are staged and stored, and it is committed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from polytrain.checkpoint.manifest import Manifest, StoredFile


@dataclass(frozen=True, slots=True, kw_only=True)
class PartStaged:
    """A worker process has handed its part of a checkpoint over to its agent."""

    attempt: int
    rank: int
    checkpoint: int
    """The checkpoint's number in the run."""

    waits: bool
    """Whether it makes no other before this one is committed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartStored:
    """One rank's part of a checkpoint lies in its final place; nothing is committed yet."""

    attempt: int
    rank: int
    checkpoint: int
    step: int
    metrics: Mapping[str, Any]
    positions: Mapping[str, Any]
    """Data set → where the rank stood in it, as plain values."""

    files: tuple[StoredFile, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartVoid:
    """One rank's part of a checkpoint isn't any more what was reported."""

    attempt: int
    rank: int
    checkpoint: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """A checkpoint's manifest is written."""

    manifest: Manifest
    stamps: Mapping[str, tuple[int, ...]]
    """What changes whenever one of its files does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesIgnored:
    """A rank has reported a checkpoint where only rank 0's is kept."""

    attempt: int
    rank: int
    step: int
    names: tuple[str, ...]
    """Of its files, relative to the reported directory."""


CheckpointEvent = PartStaged | PartStored | PartVoid | Committed
