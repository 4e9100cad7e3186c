"""Tracks requested validations of checkpoints, and their outcomes. Pure.

The journal is the record: it passes one driver's requests to the next. A checkpoint is validated
once, whatever happens to drivers and worker processes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any


class ValidationStatus(StrEnum):
    """The status of a checkpoint's validation."""

    PENDING = "pending"
    """The validation is requested, and may be running."""

    VALIDATED = "validated"
    TIMED_OUT = "timed_out"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """The validation of one checkpoint."""

    checkpoint: str
    """Name of the checkpoint's directory."""

    step: int
    """The checkpoint's step, for which the history gets the metrics."""

    task: Mapping[str, Any] = field(default_factory=dict)
    """The report's request; see `config.validation_config.validation_of_report`."""

    status: ValidationStatus = ValidationStatus.PENDING
    metrics: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""


class Validations:
    """The validations of a run, in the order in which they were requested."""

    def __init__(self) -> None:
        self._pending: dict[str, Validation] = {}
        self._ended: dict[str, Validation] = {}

    def request(self, validation: Validation) -> bool:
        """Add a validation; return False if it was requested before."""
        if self.of(validation.checkpoint) is not None:
            return False
        self._pending[validation.checkpoint] = validation
        return True

    def end(self, ended: Validation) -> None:
        """Note that a validation has ended."""
        self._pending.pop(ended.checkpoint, None)
        self._ended[ended.checkpoint] = ended

    def retry_failed(self) -> None:
        """Make failed validations pending again."""
        for name, ended in list(self._ended.items()):
            if ended.status is not ValidationStatus.VALIDATED:
                del self._ended[name]
                self._pending[name] = replace(ended, status=ValidationStatus.PENDING, reason="")

    def drop_after(self, step: int) -> None:
        """Forget the validations of checkpoints of later steps, which a restart has undone."""
        for known in (self._pending, self._ended):
            for name in [name for name, each in known.items() if each.step > step]:
                del known[name]

    def due(self, committed: Collection[str]) -> Validation | None:
        """Return the next checkpoint to validate.

        Args:
            committed: directories of committed checkpoints. Other checkpoints aren't due.
        """
        return next((each for each in self.pending if each.checkpoint in committed), None)

    @property
    def failure(self) -> str:
        """The reason that no checkpoint has a score if all ended validations failed; else empty."""
        failed = [e for e in self._ended.values() if e.status is not ValidationStatus.VALIDATED]
        if not failed or len(failed) < len(self._ended):
            return ""
        what = f"all {len(failed)} validations failed" if failed[1:] else "its validation failed"
        return f"{what}: {failed[-1].reason.partition(chr(10))[0]}"

    def of(self, checkpoint: str) -> Validation | None:
        """Return the validation of a checkpoint; None if none was requested."""
        return self._pending.get(checkpoint) or self._ended.get(checkpoint)

    @property
    def pending(self) -> Collection[Validation]:
        """The validations that haven't ended."""
        return self._pending.values()

    @property
    def newest(self) -> Validation | None:
        """The last validation that has returned metrics; None if none has."""
        ended = reversed(self._ended.values())
        return next((each for each in ended if each.status is ValidationStatus.VALIDATED), None)

    def __len__(self) -> int:
        return len(self._pending) + len(self._ended)

    def metrics_of(self, checkpoint: str, reported: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a checkpoint's metrics, with those that its validation has returned."""
        ended = self._ended.get(checkpoint)
        return {**reported, **ended.metrics} if ended is not None and ended.metrics else reported
