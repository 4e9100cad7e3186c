"""What a worker process gets: the job of the run, and the order of one attempt."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polytrain.checkpoint.manifest import AttemptId
from polytrain.checkpoint.starting_point import StartingPoint
from polytrain.policy.stop_rule import StopRule
from polytrain.storage.location import Location
from polytrain_plugins import Backend, CheckpointKind, Member


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerJob:
    """The job, the same for every rank and attempt of a run."""

    run_name: str
    backend: Backend
    training_function: Callable[..., Any] | None
    training_config: Mapping[str, Any] | None
    checkpoint_frequency: int
    checkpoint_kind: CheckpointKind
    merges_files: bool
    """Whether files that other ranks report are added to rank 0's checkpoint."""

    max_in_flight: int
    """Maximum concurrent uploads; further reports wait."""

    waits_for_commit: bool
    """Whether a report with a checkpoint waits for the commit."""

    near_staging: Path | None
    """Staging directory on the storage's own file system."""

    checkpoints: Location
    """Location of committed checkpoints."""

    validates: bool = False
    """Whether the run has a function that validates checkpoints."""

    stop_rule: StopRule = field(default_factory=StopRule)
    """The conditions that end the run."""

    saves_by_itself: bool = False
    """Whether checkpoints are made without a training function's reports."""

    def writes_checkpoints(self, rank: int) -> bool:
        """Return whether the files that this rank reports are part of a checkpoint."""
        return rank == 0 or self.merges_files or self.checkpoint_kind is CheckpointKind.EVERY_RANK


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOrder:
    """The order of one attempt, the same for all its ranks."""

    attempt_id: AttemptId
    members: tuple[Member, ...]
    start: StartingPoint
    first_checkpoint: int
    """Number of this attempt's first checkpoint."""

    @property
    def attempt(self) -> int:
        """Number of the attempt among its driver's."""
        return self.attempt_id.attempt
