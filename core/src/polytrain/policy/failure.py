"""Whether a failed attempt is followed by another.

Rules are asked one after another; the first that has something to say decides. A rule is a pure
function of the failed attempts of a run, the latest last.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal

from polytrain.common.errors import Failure, FailureKind

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

_PASSING = re.compile(
    r"0x[0-9a-fA-F]+|\[\d\d:\d\d:\d\d\]|\[?(?:\d{1,3}\.){3}\d{1,3}\]?:\d+|\[[0-9a-f:]*::?[0-9a-f:]*\]:\d+"
)
"""Addresses of objects, times of day, hosts with ports: they differ in two of one message."""

_BROKEN_CONNECTION = re.compile(
    r"connection (?:was )?(?:closed|reset|aborted|refused)|broken pipe|socket closed|"
    r"peer closed|remote process exited|NCCL error.*remote",
    re.IGNORECASE,
)
"""What gloo, NCCL, the boosters' networks and gRPC say where a peer, or the way to it, is gone."""

_CRASH = re.compile(r"killed by SIG(?:SEGV|BUS|ILL|FPE|ABRT|TRAP|SYS)|exited with code")
"""Ends that a process brings about itself; SIGKILL and SIGTERM come from outside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankError:
    """An error as it can be recognised in another attempt."""

    kind: FailureKind
    message: str
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedAttempt:
    """What is known of an attempt that has failed."""

    root: Failure
    """The failure that the others follow from."""

    on_every_rank: bool = False
    """Whether all ranks have raised the same exception at the same step."""

    errors: frozenset[RankError] = frozenset()
    """What may come again, on whatever rank it was."""

    committed: int = 0
    """Step of the newest checkpoint when all processes were gone; 0 if there was none."""

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
            runs_of_others_are_left_alone,
            preemptions_are_free,
            user_errors_are_retried(self.retry_user_errors),
            repeated_errors_end_the_run(self.retry_user_errors),
            starting_is_tried_again(_START_FAILURES),
            failures_are_counted(self.max_failures),
        )
        decisions = (rule(attempts) for rule in rules)
        return next(decision for decision in decisions if decision is not None)


def runs_of_others_are_left_alone(attempts: Attempts) -> Decision | None:
    """Whoever has lost the run's lease would disturb the driver that has it."""
    if attempts[-1].root.kind is not FailureKind.LEASE_LOST:
        return None
    return Decision(restart=False, reason="another driver works on the run")


def preemptions_are_free(attempts: Attempts) -> Decision | None:
    """Nobody is to blame for a node that was taken away with notice."""
    if attempts[-1].is_charged:
        return None
    return Decision(restart=True, reason="a preemption isn't counted as a failure")


def user_errors_are_retried(how: bool | Literal["unless_repeated"]) -> Rule:
    """What the user's own code does wrong, it will do again, if nothing else has changed."""

    def rule(attempts: Attempts) -> Decision | None:
        latest = attempts[-1]
        if latest.root.kind not in _RAISED or how is True:
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
        return None

    return rule


def repeated_errors_end_the_run(how: bool | Literal["unless_repeated"]) -> Rule:
    """An error that comes again at the same step is the user's, whatever it is.

    It doesn't matter which rank reports first, or whether it is the cause in both attempts. Where a
    checkpoint was committed in between, the run has come further.
    """

    def rule(attempts: Attempts) -> Decision | None:
        if how is True or len(attempts) < 2:
            return None
        before, latest = attempts[-2:]
        repeated = before.errors & latest.errors
        if not repeated or latest.committed > before.committed:
            return None
        step = next(iter(repeated)).step
        return Decision(
            restart=False,
            reason=f"the same error at step {step} as in the attempt before, "
            "so another attempt would meet it again",
        )

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


_RAISED = (
    FailureKind.USER_ERROR,
    FailureKind.CHECKPOINT_MISMATCH,
    FailureKind.OUT_OF_MEMORY,
)
"""What the user's own code raises."""


def classified(failure: Failure) -> Failure:
    """A rank's failure; an exception that tells of a broken connection is the network's."""
    if failure.kind is FailureKind.USER_ERROR and _BROKEN_CONNECTION.search(failure.message):
        return replace(failure, kind=FailureKind.CONNECTION_LOST)
    return failure


def failed_attempt(
    failures: Sequence[Failure],
    *,
    world_size: int,
    has_reported: bool,
    lasted_s: float,
    committed: int = 0,
) -> FailedAttempt:
    """Sum up what has gone wrong in one attempt.

    Args:
        failures: in the order in which they were reported; not empty.
        world_size: ranks.
        has_reported: whether any of them has reported a step.
        lasted_s: seconds from the launch to the first failure.
        committed: step of the newest checkpoint.
    """
    root = root_cause(failures)
    error = _error_of(root)
    alike = {failure.rank for failure in failures if error and _error_of(failure) == error}
    # What peers say of a connection to a process that is gone isn't an error of theirs.
    of_their_own = [
        failure
        for failure in failures
        if failure.kind is not FailureKind.CONNECTION_LOST or not root.kind.is_loss
    ]
    return FailedAttempt(
        root=root,
        on_every_rank=world_size > 1 and len(alike) == world_size,
        errors=frozenset(error for error in map(_error_of, of_their_own) if error),
        has_reported=has_reported,
        lasted_s=lasted_s,
        committed=committed,
    )


def root_cause(failures: Sequence[Failure]) -> Failure:
    """The failure that the others follow from.

    If another driver has the run, nothing else matters. A lost process makes its peers raise: when
    there is one, it is the cause even though the peers' exceptions may arrive first. So does a rank
    that raises an exception of its own: its peers lose the connection to it. Otherwise the first to
    be reported is.
    """
    taken = (failure for failure in failures if failure.kind is FailureKind.LEASE_LOST)
    lost = (failure for failure in failures if failure.kind.is_loss)
    own = (failure for failure in failures if failure.kind is not FailureKind.CONNECTION_LOST)
    return next(chain(taken, lost, own, failures))


def _exception_of(failure: Failure) -> str:
    """The type of a failure's exception, without its module."""
    return failure.message.partition(":")[0].rpartition(".")[2]


def _error_of(failure: Failure) -> RankError | None:
    """The error as it would look in another attempt; None for what comes from outside."""
    is_crash = failure.kind is FailureKind.WORKER_LOST and _CRASH.match(failure.message)
    if failure.kind not in (*_RAISED, FailureKind.CONNECTION_LOST) and not is_crash:
        return None
    message = _PASSING.sub("", failure.message)
    return RankError(kind=failure.kind, message=message, step=failure.step)
