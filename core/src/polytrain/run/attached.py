"""What satellites attach to a run, as the driver sees it."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from polytrain.checkpoint.manifest import Manifest
from polytrain.errors import Failure
from polytrain.policy.validation import Validation


class Companion:
    """Works on a run's checkpoints beside training. This one does nothing.

    The controller asks it what has ended, and waits for the rest when training has.
    """

    failure: Failure | None = None
    """A failure of its work that ends the run."""

    def __enter__(self) -> Companion:
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
        """Number of committed checkpoints that it isn't done with."""
        return 0

    @property
    def all_failed(self) -> str:
        """Why none of its work has succeeded, if all has failed; else empty."""
        return ""

    def request(self, manifest: Manifest) -> None:
        """Note a checkpoint before it is committed."""

    def nudge(self) -> None:
        """Make `take` return that waits. Any thread, or a signal handler, may call this."""

    def take(self, *, wait: bool = False) -> Sequence[Validation]:
        """Take what there is to take, and start what is next.

        Args:
            wait: whether to wait until there is something; only while it `is_busy`.

        Returns:
            What has ended.
        """
        return ()

    def warn_if_unused(self) -> None:
        """Warn if the user has given it work, and no checkpoint was any."""
