"""Reports of boosting rounds from training functions, with the model where a checkpoint is due."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polytrain
from polytrain.boosting.reported_metrics import ReportedMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundReports:
    """What a booster's report callback reports, and when it saves the model."""

    filename: str
    """The model's file in a checkpoint."""

    frequency: int = 0
    """Rounds between two checkpoints; 0 for none before the end."""

    at_end: bool = True
    """Whether the last round has a checkpoint."""

    reported: ReportedMetrics = field(default_factory=ReportedMetrics)

    def report(
        self,
        round_: int,
        measured: Mapping[str, Any],
        *,
        is_last: bool,
        save: Callable[[Path], None],
    ) -> None:
        """Report a round. Only rank 0 saves the model: it is the same on all ranks.

        Args:
            round_: counts from 1.
            measured: metrics by their full names, such as "valid-logloss".
            is_last: whether training ends with this round.
            save: writes the model into a file.

        Raises:
            KeyError: a chosen metric isn't measured.
        """
        metrics = self.reported.of(measured)
        is_due = self.frequency > 0 and round_ % self.frequency == 0
        is_saved = is_due or (is_last and self.at_end)
        if polytrain.get_context().get_world_rank() > 0 or not is_saved:
            polytrain.report(metrics)
            return
        with tempfile.TemporaryDirectory() as directory:
            save(Path(directory, self.filename))
            polytrain.report(metrics, checkpoint=polytrain.Checkpoint.from_directory(directory))
