"""What a trainer is given: the work of the whole run, and one generation's order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polytrain.checkpoint.start import StartingPoint
from polytrain.checkpoint.store import CheckpointStore
from polytrain_plugins import Backend, CheckpointKind, Member


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerJob:
    """The work: the same for every rank and generation of a run."""

    run_name: str
    run_path: Path
    backend: Backend
    training_function: Callable[..., Any] | None
    training_config: Mapping[str, Any] | None
    checkpoint_frequency: int

    @property
    def store(self) -> CheckpointStore:
        """Where the run's checkpoints go."""
        return CheckpointStore(run_path=self.run_path)

    def writes_checkpoints(self, rank: int) -> bool:
        """Whether what this rank reports is part of a checkpoint."""
        return rank == 0 or self.backend.capabilities.checkpoint is CheckpointKind.EVERY_RANK


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOrder:
    """One generation: the same for every rank of it."""

    generation: int
    members: tuple[Member, ...]
    start: StartingPoint
    first_checkpoint: int
    """Number of the first checkpoint that this generation makes."""
