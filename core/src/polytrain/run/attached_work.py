"""The protocol of work on a run's checkpoints beside training, such as their validation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from polytrain.checkpoint.manifest import Manifest
from polytrain.errors import Failure
from polytrain.policy.validation import Validation


class AttachedWork(Protocol):
    """Works on a run's checkpoints beside training.

    The controller polls it for results, and waits for the rest when training has ended.
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

    def nudge(self) -> None:
        """Wake a waiting `take`. Any thread, or a signal handler, may call this."""

    def take(self, *, wait: bool = False) -> Sequence[Validation]:
        """Start the next work, and return the validations that have ended.

        Args:
            wait: whether to wait for a result; only while it `is_busy`.
        """

    def warn_if_unused(self) -> None:
        """Warn if the user has configured it, but no checkpoint used it."""
