"""The checkpoints of a run, as a training function gets them while the run lasts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from polytrain.checkpoint.checkpoint import Checkpoint


class CheckpointConsistencyMode(Enum):
    """What `get_all_reported_checkpoints` waits for."""

    COMMITTED = "COMMITTED"
    """The commit of what this rank has reported."""

    VALIDATED = "VALIDATED"
    """The same, and the end of all validations that are requested."""


class ReportedCheckpointStatus(Enum):
    """What has become of a reported checkpoint."""

    COMMITTED = "COMMITTED"
    """It is stored; no validation was requested."""

    PENDING_VALIDATION = "PENDING_VALIDATION"
    VALIDATED = "VALIDATED"
    VALIDATION_TIMEOUT = "VALIDATION_TIMEOUT"
    VALIDATION_FAILED = "VALIDATION_FAILED"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedCheckpoint:
    """A committed checkpoint of the run."""

    checkpoint: Checkpoint
    metrics: Mapping[str, Any]
    """Those of its report, and those of its validation."""

    status: ReportedCheckpointStatus
