"""The checkpoints of a run, in the form for its training function."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from polytrain.checkpoint.checkpoint import Checkpoint
from polytrain.policy.validation import ValidationStatus
from polytrain.text.short_repr import ShortRepr


class CheckpointConsistencyMode(Enum):
    """The condition that `get_all_reported_checkpoints` waits for."""

    COMMITTED = "COMMITTED"
    """Wait for the commit of all checkpoints that this rank has reported."""

    VALIDATED = "VALIDATED"
    """Wait also for the end of all requested validations."""


class ReportedCheckpointStatus(Enum):
    """The status of a reported checkpoint."""

    COMMITTED = "COMMITTED"
    """The checkpoint is committed; no validation was requested."""

    PENDING_VALIDATION = "PENDING_VALIDATION"
    VALIDATED = "VALIDATED"
    VALIDATION_TIMEOUT = "VALIDATION_TIMEOUT"
    VALIDATION_FAILED = "VALIDATION_FAILED"


STATUS_BY_VALIDATION = {
    "": ReportedCheckpointStatus.COMMITTED,
    ValidationStatus.PENDING: ReportedCheckpointStatus.PENDING_VALIDATION,
    ValidationStatus.VALIDATED: ReportedCheckpointStatus.VALIDATED,
    ValidationStatus.TIMED_OUT: ReportedCheckpointStatus.VALIDATION_TIMEOUT,
    ValidationStatus.FAILED: ReportedCheckpointStatus.VALIDATION_FAILED,
}
"""`ValidationStatus` of a checkpoint, or "" if no validation was requested → its status."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ReportedCheckpoint(ShortRepr):
    """A committed checkpoint of the run."""

    checkpoint: Checkpoint
    metrics: Mapping[str, Any]
    """The metrics of its report and of its validation."""

    status: ReportedCheckpointStatus
