"""Whether a failed attempt is followed by another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from polytrain.errors import Failure, FailureKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to do, and why."""

    restart: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FailurePolicy:
    """Restart up to `max_failures` times; without limit when it is -1."""

    max_failures: int = 0

    def decide(self, roots: Sequence[Failure]) -> Decision:
        """Decide about the latest failure.

        Args:
            roots: the root cause of every failed attempt of the run, the latest last; not empty.
        """
        latest, failures = roots[-1], len(roots)
        if len(roots) > 1 and _same_user_error(roots[-2], latest):
            return Decision(
                restart=False,
                reason=f"the same error at step {latest.step} as in the attempt before, "
                "so another attempt would meet it again",
            )
        if self.max_failures < 0:
            return Decision(restart=True, reason=f"failure {failures}, max_failures is unlimited")
        count = f"failure {failures} of max_failures={self.max_failures}"
        if failures <= self.max_failures:
            return Decision(restart=True, reason=count)
        if self.max_failures == 0:
            return Decision(restart=False, reason="max_failures=0 allows no restart")
        return Decision(restart=False, reason=f"{count}: no restart is left")


_THE_USERS = (FailureKind.USER_ERROR, FailureKind.UNMATCHED_PARTS)
"""What the user's own code does wrong."""


def root_cause(failures: Sequence[Failure]) -> Failure:
    """The failure that the others follow from.

    A lost process makes its peers raise: when there is one, it is the cause even though the
    peers' exceptions may arrive first. Otherwise the first to be reported is.
    """
    return next((failure for failure in failures if failure.kind.is_loss), failures[0])


def _same_user_error(before: Failure, now: Failure) -> bool:
    return (
        before.kind is now.kind
        and now.kind in _THE_USERS
        and before.message == now.message
        and before.step == now.step
    )
