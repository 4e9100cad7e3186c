"""The events of a checkpoint: ranks stage parts, agents store them, the driver commits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from polytrain.checkpoint.manifest import Manifest, StoredFile


@dataclass(frozen=True, slots=True, kw_only=True)
class PartStaged:
    """A worker process has staged its part of a checkpoint for its agent."""

    attempt: int
    rank: int
    checkpoint: int
    """The checkpoint's number in the run."""

    waits: bool
    """Whether the worker process waits for the commit before it reports another checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartStored:
    """The agent has stored one rank's part of a checkpoint. Nothing is committed yet."""

    attempt: int
    rank: int
    checkpoint: int
    step: int
    metrics: Mapping[str, Any]
    positions: Mapping[str, Any]
    """Data set → the rank's position in it, as plain values."""

    files: tuple[StoredFile, ...]
    left_out: tuple[str, ...] = ()
    """Files that differ from rank 0's file of the same name, which is kept."""

    validation: Mapping[str, Any] | None = None
    """The requested validation, as plain values; None if none is requested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartVoid:
    """A rank's part is invalid: its files have changed since the rank reported them."""

    attempt: int
    rank: int
    checkpoint: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """A checkpoint's manifest is written."""

    manifest: Manifest
    stamps: Mapping[str, tuple[int, ...]]
    """File → values that change whenever the file changes."""

    ranks: frozenset[int] = frozenset()
    """The ranks whose parts are in the checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointsAsked:
    """A training function asks for the run's checkpoints."""

    attempt: int
    rank: int
    number: int
    """Number of the question in its worker process."""

    validated: bool
    """Whether the answer waits for all validations."""


CheckpointEvent = PartStaged | PartStored | PartVoid | Committed
