"""The protocol of work on a run's checkpoints beside training, such as their validation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from polytrain.checkpoint.manifest import Manifest
from polytrain.errors import Failure
from polytrain.policy.validation import Validation


class AttachedWork(Protocol):
    """Works on a run's checkpoints beside training.

    It puts `WorkEnded` into the driver's mailbox when `take` has a result. When training has ended,
    the driver waits for the rest.
    """

    failure: Failure | None
    """A failure of its work that ends the run."""

    @property
    def is_busy(self) -> bool:
        """Whether it works on a committed checkpoint, or has one to work on."""

    @property
    def pending(self) -> int:
        """Number of committed checkpoints that it hasn't finished."""

    @property
    def all_failed(self) -> str:
        """The reason if all its work has failed; else empty."""

    def request(self, manifest: Manifest) -> None:
        """Note a checkpoint before it is committed."""

    def take(self) -> Sequence[Validation]:
        """Return the validations that have ended, and start the next work.

        To be called with each `WorkEnded`, and when there may be work: as the run begins, and after
        each commit.
        """

    def warn_if_unused(self) -> None:
        """Warn if the user has configured it, but no checkpoint used it."""
