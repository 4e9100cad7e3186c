"""The driver's interface to work that satellites attach to a run."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from polytrain.checkpoint.manifest import Manifest
from polytrain.errors import Failure
from polytrain.policy.validation import Validation


class AttachedWork:
    """Works on a run's checkpoints beside training. This one does nothing.

    The controller polls it for results, and waits for the rest when training has ended.
    """

    failure: Failure | None = None
    """A failure of its work that ends the run."""

    def __enter__(self) -> AttachedWork:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Release everything."""

    @property
    def is_busy(self) -> bool:
        """Whether it works on a committed checkpoint, or has one to work on."""
        return False

    @property
    def pending(self) -> int:
        """Number of committed checkpoints that it hasn't finished."""
        return 0

    @property
    def all_failed(self) -> str:
        """The reason if all its work has failed; else empty."""
        return ""

    def request(self, manifest: Manifest) -> None:
        """Note a checkpoint before it is committed."""

    def nudge(self) -> None:
        """Wake a waiting `take`. Any thread, or a signal handler, may call this."""

    def take(self, *, wait: bool = False) -> Sequence[Validation]:
        """Collect results, and start the next work.

        Args:
            wait: whether to wait for a result; only while it `is_busy`.

        Returns:
            The validations that have ended.
        """
        return ()

    def warn_if_unused(self) -> None:
        """Warn if the user has configured it, but no checkpoint used it."""
