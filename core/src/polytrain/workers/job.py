"""What a worker process is given: the work of the whole run, and one attempt's order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polytrain.checkpoint.manifest import AttemptId
from polytrain.checkpoint.starting_point import StartingPoint
from polytrain.storage.location import Location
from polytrain_plugins import Backend, CheckpointKind, Member


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerJob:
    """The work: the same for every rank and attempt of a run."""

    run_name: str
    backend: Backend
    training_function: Callable[..., Any] | None
    training_config: Mapping[str, Any] | None
    checkpoint_frequency: int
    checkpoint_kind: CheckpointKind
    max_in_flight: int
    """Checkpoints that may be on their way to the storage while training goes on."""

    waits_for_commit: bool
    """Whether a report with a checkpoint returns only when that is committed."""

    near_staging: Path | None
    """Where files may be staged on the storage's own file system."""

    checkpoints: Location
    """Where committed checkpoints are."""

    def writes_checkpoints(self, rank: int) -> bool:
        """Whether what this rank reports is part of a checkpoint."""
        return rank == 0 or self.checkpoint_kind is CheckpointKind.EVERY_RANK


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOrder:
    """One attempt: the same for every rank of it."""

    attempt_id: AttemptId
    members: tuple[Member, ...]
    start: StartingPoint
    first_checkpoint: int
    """Number of the first checkpoint that this attempt makes."""

    @property
    def attempt(self) -> int:
        """Number of the attempt among its driver's."""
        return self.attempt_id.attempt
