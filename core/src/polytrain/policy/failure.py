"""Whether a failed attempt is followed by another.

Rules are asked one after another; the first that has something to say decides. A rule is a pure
function of the failed attempts of a run, the latest last.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from polytrain.errors import Failure, FailureKind

_START_FAILURES = 5
"""Attempts in a row that may end before they have trained."""

_TRAINED_S = 30.0
"""An attempt that has lasted this long has trained, whether or not it has reported."""

_BUGS = frozenset(
    {
        "ArithmeticError",
        "AssertionError",
        "AttributeError",
        "ImportError",
        "IndexError",
        "KeyError",
        "LookupError",
        "ModuleNotFoundError",
        "NameError",
        "NotImplementedError",
        "OverflowError",
        "SyntaxError",
        "TypeError",
        "UnboundLocalError",
        "ValueError",
        "ZeroDivisionError",
    }
)
"""Exceptions that come again. A broken collective raises others, on every rank too."""

_REFUSALS = frozenset({"BadDataError"})
"""Exceptions by which data are refused: in another attempt they are the same."""

_PASSING = re.compile(r"0x[0-9a-fA-F]+|\[\d\d:\d\d:\d\d\]")
"""Addresses of objects and times of day, which differ between two of the same message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedAttempt:
    """What is known of an attempt that has failed."""

    root: Failure
    """The failure that the others follow from."""

    on_every_rank: bool = False
    """Whether all ranks have raised the same exception at the same step."""

    has_reported: bool = True
    """Whether any rank has reported a step."""

    lasted_s: float = 0.0
    """Seconds from its launch to its first failure."""

    @property
    def has_trained(self) -> bool:
        """Whether it came further than its start."""
        return self.has_reported or self.lasted_s >= _TRAINED_S

    @property
    def is_charged(self) -> bool:
        """Whether it counts as one of the failures that are allowed."""
        return self.root.kind is not FailureKind.PREEMPTED


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to do, and why."""

    restart: bool
    reason: str


Attempts = Sequence[FailedAttempt]
Rule = Callable[[Attempts], Decision | None]
"""None leaves the decision to the next rule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailurePolicy:
    """The rules that a user's `FailureConfig` amounts to."""

    max_failures: int = 0
    retry_user_errors: bool | Literal["unless_repeated"] = "unless_repeated"

    def decide(self, attempts: Attempts) -> Decision:
        """Decide about the latest failure.

        Args:
            attempts: every failed attempt of the run, the latest last; not empty.
        """
        rules: tuple[Rule, ...] = (
            preemptions_are_free,
            user_errors_are_retried(self.retry_user_errors),
            starting_is_tried_again(_START_FAILURES),
            failures_are_counted(self.max_failures),
        )
        decisions = (rule(attempts) for rule in rules)
        return next(decision for decision in decisions if decision is not None)


def preemptions_are_free(attempts: Attempts) -> Decision | None:
    """Nobody is to blame for a node that was taken away with notice."""
    if attempts[-1].is_charged:
        return None
    return Decision(restart=True, reason="a preemption isn't counted as a failure")


def user_errors_are_retried(how: bool | Literal["unless_repeated"]) -> Rule:
    """What the user's own code does wrong, it will do again, if nothing else has changed."""

    def rule(attempts: Attempts) -> Decision | None:
        latest = attempts[-1]
        if latest.root.kind not in _THE_USERS or how is True:
            return None
        if how is False and latest.root.kind is not FailureKind.OUT_OF_MEMORY:
            return Decision(
                restart=False, reason="retry_user_errors=False allows no restart after it"
            )
        if _exception_of(latest.root) in _REFUSALS:
            return Decision(
                restart=False, reason="another attempt would be made with the same data"
            )
        if latest.on_every_rank and _exception_of(latest.root) in _BUGS:
            return Decision(
                restart=False,
                reason="every rank has raised it, so another attempt would meet it again",
            )
        if len(attempts) > 1 and _is_same(attempts[-2].root, latest.root):
            return Decision(
                restart=False,
                reason=f"the same error at step {latest.root.step} as in the attempt before, "
                "so another attempt would meet it again",
            )
        return None

    return rule


def starting_is_tried_again(limit: int) -> Rule:
    """Attempts that end before they train cost next to nothing: without this they never end."""

    def rule(attempts: Attempts) -> Decision | None:
        if len(attempts) < limit or any(attempt.has_trained for attempt in attempts[-limit:]):
            return None
        return Decision(
            restart=False, reason=f"{limit} attempts in a row have ended before they trained"
        )

    return rule


def failures_are_counted(most: int) -> Rule:
    """So many failures are recovered from; -1 is any number."""

    def rule(attempts: Attempts) -> Decision | None:
        failures = sum(attempt.is_charged for attempt in attempts)
        if most < 0:
            return Decision(restart=True, reason=f"failure {failures}, max_failures is unlimited")
        if most == 0:
            return Decision(restart=False, reason="max_failures=0 allows no restart")
        count = f"failure {failures} of max_failures={most}"
        if failures <= most:
            return Decision(restart=True, reason=count)
        return Decision(restart=False, reason=f"{count}: no restart is left")

    return rule


_THE_USERS = (
    FailureKind.USER_ERROR,
    FailureKind.UNMATCHED_PARTS,
    FailureKind.OUT_OF_MEMORY,
)
"""What the user's own code does, and does again."""


def failed_attempt(
    failures: Sequence[Failure], *, world_size: int, has_reported: bool, lasted_s: float
) -> FailedAttempt:
    """Sum up what has gone wrong in one attempt.

    Args:
        failures: in the order in which they were told; not empty.
        world_size: ranks.
        has_reported: whether any of them has reported a step.
        lasted_s: seconds from the launch to the first failure.
    """
    root = root_cause(failures)
    alike = {failure.rank for failure in failures if _is_same(failure, root)}
    return FailedAttempt(
        root=root,
        on_every_rank=world_size > 1 and len(alike) == world_size,
        has_reported=has_reported,
        lasted_s=lasted_s,
    )


def root_cause(failures: Sequence[Failure]) -> Failure:
    """The failure that the others follow from.

    A lost process makes its peers raise: when there is one, it is the cause even though the
    peers' exceptions may arrive first. Otherwise the first to be reported is.
    """
    return next((failure for failure in failures if failure.kind.is_loss), failures[0])


def _exception_of(failure: Failure) -> str:
    """The type of a failure's exception, without its module."""
    return failure.message.partition(":")[0].rpartition(".")[2]


def _is_same(one: Failure, other: Failure) -> bool:
    """Whether it is the same exception at the same step."""
    return (
        one.kind is other.kind
        and one.kind in _THE_USERS
        and _PASSING.sub("", one.message) == _PASSING.sub("", other.message)
        and one.step == other.step
    )
