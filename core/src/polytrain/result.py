"""What a run leaves behind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polytrain.checkpoint.checkpoint import Checkpoint
from polytrain.errors import CheckpointError, TrainingFailedError
from polytrain_plugins import Backend


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The outcome of `Trainer.fit`."""

    metrics: Mapping[str, Any] = field(default_factory=dict)
    """What rank 0 reported last."""

    history: tuple[Mapping[str, Any], ...] = ()
    """Every report of rank 0 that led to this result, in order. What was reported after the
    checkpoint that a restart went on from was done again, and stands here once."""

    checkpoint: Checkpoint | None = None
    """The newest committed checkpoint."""

    best_checkpoints: tuple[tuple[Checkpoint, Mapping[str, Any]], ...] = ()
    """The checkpoints that were kept, from best to worst, each with its metrics."""

    path: str
    """The run's directory: checkpoints, journal and logs."""

    restarts: int = 0
    """Attempts after the first."""

    error: TrainingFailedError | None = None
    """Why the run failed; None if it didn't."""

    backend: Backend = field(repr=False)

    def load_model(self) -> Any:
        """The model of the newest checkpoint, as the framework's own object.

        A training function's checkpoint must hold the files that the backend's `Engine.save`
        writes; each backend's page says which.

        Raises:
            CheckpointError: if there is no checkpoint.
        """
        if self.checkpoint is None:
            raise CheckpointError(
                f"The run in {self.path} has no checkpoint to load a model from. Report one: "
                "report(metrics, checkpoint=Checkpoint.from_directory(path))."
            )
        return self.backend.engine().load(Path(self.checkpoint.path))
