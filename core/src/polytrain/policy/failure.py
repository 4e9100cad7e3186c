"""Decides whether a failed attempt is restarted.

Rules are evaluated in order; the first that returns a decision wins. A rule is a pure function of
a run's failed attempts, the latest last.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Literal

from polytrain.errors import Failure, FailureKind

_START_FAILURES = 5
"""Consecutive attempts that may end before they train; then the run ends."""

_TRAINED_S = 30.0
"""An attempt that lasts this long counts as trained, even without a report."""

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
"""Exceptions that recur in the next attempt. A broken collective raises other exceptions, also on
every rank."""

_BAD_DATA = frozenset({"BadDataError"})
"""Exceptions that reject the data, which the next attempt reads again."""

_PASSING = re.compile(
    r"0x[0-9a-fA-F]+|[\[|]\d\d:\d\d:\d\d\]|\[?(?:\d{1,3}\.){3}\d{1,3}\]?:\d+|\[[0-9a-f:]*::?[0-9a-f:]*\]:\d+"
)
"""Parts in which messages of equal errors differ: object addresses, times, hosts with ports."""

_CRASH = re.compile(r"killed by SIG(?:SEGV|BUS|ILL|FPE|ABRT|TRAP|SYS)|exited with code")
"""Exits that a process causes itself, unlike SIGKILL and SIGTERM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankError:
    """An error in a form that can be compared between attempts."""

    kind: FailureKind
    message: str
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedAttempt:
    """Summary of a failed attempt."""

    root: Failure
    """The failure that caused the others."""

    on_every_rank: bool = False
    """Whether all ranks have raised the same exception at the same step."""

    errors: frozenset[RankError] = frozenset()
    """Errors of all ranks that may recur."""

    committed: int = 0
    """Step of the newest checkpoint when all processes were gone; 0 if there was none."""

    has_reported: bool = True
    """Whether any rank has reported a step."""

    lasted_s: float = 0.0
    """Seconds from its launch to its first failure."""

    nodes: frozenset[str] = frozenset()
    """Nodes on which processes were lost."""

    @property
    def has_trained(self) -> bool:
        """Whether it got beyond its start: it reported a step, or lasted long enough."""
        return self.has_reported or self.lasted_s >= _TRAINED_S

    @property
    def is_charged(self) -> bool:
        """Whether it counts towards `max_failures`."""
        return self.root.kind is not FailureKind.PREEMPTED

    def is_late_news_of(self, before: FailedAttempt) -> bool:
        """Whether it ended by what had already ended the attempt before.

        Each agent of a lost node is reported by itself, some only after the next launch. If all
        connections of a node are reset, the ranks notice theirs at once, and Ray its own later.
        """
        if self.has_trained:
            return False
        if self.root.kind is FailureKind.AGENT_LOST:
            return before.root.kind is FailureKind.CONNECTION_LOST
        is_of_a_node = self.root.kind is FailureKind.NODE_LOST and bool(self.nodes)
        return is_of_a_node and self.nodes <= before.nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The decision whether to restart, and its reason."""

    restart: bool
    reason: str


Attempts = Sequence[FailedAttempt]
Rule = Callable[[Attempts], Decision | None]
"""None leaves the decision to the next rule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailurePolicy:
    """The rules of a user's `FailureConfig`."""

    max_failures: int = 0
    retry_user_errors: bool | Literal["unless_repeated"] = "unless_repeated"

    def decide(self, attempts: Attempts) -> Decision:
        """Decide about the latest failure.

        Args:
            attempts: every failed attempt of the run, the latest last; not empty.
        """
        rules: tuple[Rule, ...] = (
            lost_leases_end_the_run,
            failed_validations_end_the_run,
            preemptions_are_free,
            user_errors_are_retried(self.retry_user_errors),
            repeated_errors_end_the_run(self.retry_user_errors),
            failed_starts_are_limited(_START_FAILURES),
            losses_are_counted_once,
            failures_are_counted(self.max_failures),
        )
        decisions = (rule(attempts) for rule in rules)
        return next(decision for decision in decisions if decision is not None)


def lost_leases_end_the_run(attempts: Attempts) -> Decision | None:
    """End the run: a driver without the lease would disturb the driver that holds it."""
    if attempts[-1].root.kind is not FailureKind.LEASE_LOST:
        return None
    return Decision(restart=False, reason="another driver works on the run")


def failed_validations_end_the_run(attempts: Attempts) -> Decision | None:
    """End the run: another attempt wouldn't change the validated checkpoint."""
    if attempts[-1].root.kind is not FailureKind.VALIDATION:
        return None
    return Decision(restart=False, reason="ValidationConfig(on_failure='fail') ends the run")


def preemptions_are_free(attempts: Attempts) -> Decision | None:
    """Restart without a charge: the removal of a node with notice isn't a failure."""
    if attempts[-1].is_charged:
        return None
    return Decision(restart=True, reason="a preemption isn't counted as a failure")


def user_errors_are_retried(how: bool | Literal["unless_repeated"]) -> Rule:
    """Return the rule for exceptions of the user's code, which recur if nothing else changes."""

    def rule(attempts: Attempts) -> Decision | None:
        latest = attempts[-1]
        if latest.root.kind not in _RAISED or how is True:
            return None
        if how is False and latest.root.kind is not FailureKind.OUT_OF_MEMORY:
            return Decision(
                restart=False, reason="retry_user_errors=False: exceptions aren't retried"
            )
        if _exception_of(latest.root) in _BAD_DATA:
            return Decision(restart=False, reason="not retried, because the data would be the same")
        if latest.on_every_rank and _exception_of(latest.root) in _BUGS:
            return Decision(
                restart=False,
                reason="not retried, because every rank raised it: it would come again",
            )
        return None

    return rule


def repeated_errors_end_the_run(how: bool | Literal["unless_repeated"]) -> Rule:
    """Return the rule that ends the run if an error of any kind recurs at the same step: a bug.

    It may occur on any rank, and needn't be the root cause of both attempts. If a checkpoint was
    committed in between, the run has made progress, and the rule doesn't apply.
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
            reason=f"not retried, because the attempt before had the same error at step {step}: "
            "it would come again",
        )

    return rule


def failed_starts_are_limited(limit: int) -> Rule:
    """Return the rule that limits attempts that end before they train, or they might never stop."""

    def rule(attempts: Attempts) -> Decision | None:
        if len(attempts) < limit or any(attempt.has_trained for attempt in attempts[-limit:]):
            return None
        return Decision(
            restart=False, reason=f"{limit} attempts in a row have ended before they trained"
        )

    return rule


def losses_are_counted_once(attempts: Attempts) -> Decision | None:
    """Restart without a charge if the loss is the one that has ended the attempt before."""
    if len(attempts) < 2 or not attempts[-1].is_late_news_of(attempts[-2]):
        return None
    return Decision(
        restart=True, reason="what ended the attempt before has ended this one, and is counted once"
    )


def failures_are_counted(most: int) -> Rule:
    """Return the rule that restarts at most `most` failures; -1 means any number."""

    def rule(attempts: Attempts) -> Decision | None:
        late = sum(latest.is_late_news_of(before) for before, latest in pairwise(attempts))
        failures = sum(attempt.is_charged for attempt in attempts) - late
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
"""Failures that the user's own code raises."""


def failed_attempt(
    failures: Sequence[Failure],
    *,
    world_size: int,
    has_reported: bool,
    lasted_s: float,
    committed: int = 0,
    nodes: Sequence[str] = (),
) -> FailedAttempt:
    """Sum up the failures of one attempt.

    Args:
        failures: failures in the order of their reports; not empty.
        world_size: number of ranks.
        has_reported: whether any of them has reported a step.
        lasted_s: seconds from the launch to the first failure.
        committed: step of the newest checkpoint.
        nodes: the node of each rank; empty if they aren't known.
    """
    root = root_cause(failures)
    error = _error_of(root)
    alike = {failure.rank for failure in failures if error and _error_of(failure) == error}
    # After the loss of a process, errors of its peers' broken connections don't count.
    own_errors = [
        failure
        for failure in failures
        if failure.kind is not FailureKind.CONNECTION_LOST or not root.kind.is_loss
    ]
    return FailedAttempt(
        root=root,
        on_every_rank=world_size > 1 and len(alike) == world_size,
        errors=frozenset(error for error in map(_error_of, own_errors) if error),
        has_reported=has_reported,
        lasted_s=lasted_s,
        committed=committed,
        nodes=frozenset(
            nodes[failure.rank]
            for failure in failures
            if failure.kind.is_loss and failure.rank is not None and failure.rank < len(nodes)
        ),
    )


def root_cause(failures: Sequence[Failure]) -> Failure:
    """Return the failure that caused the others.

    A lost lease comes first. Then a lost process: it makes its peers raise exceptions, which may
    arrive earlier. Then a rank's own exception: it makes its peers lose the connection. Otherwise
    the cause is the failure that was reported first.
    """
    taken = (failure for failure in failures if failure.kind is FailureKind.LEASE_LOST)
    lost = (failure for failure in failures if failure.kind.is_loss)
    own = (failure for failure in failures if failure.kind is not FailureKind.CONNECTION_LOST)
    return next(chain(taken, lost, own, failures))


def _exception_of(failure: Failure) -> str:
    """Return the type of a failure's exception, without its module."""
    return failure.message.partition(":")[0].rpartition(".")[2]


def _error_of(failure: Failure) -> RankError | None:
    """Return the error to compare between attempts; None if its cause is external."""
    is_crash = failure.kind is FailureKind.WORKER_LOST and _CRASH.match(failure.message)
    # A rank raises it if its disk is full or read-only. Agents' uploads fail for what may pass.
    is_raised = failure.kind is FailureKind.STORAGE and failure.traceback
    known = (*_RAISED, FailureKind.CONNECTION_LOST)
    if failure.kind not in known and not is_crash and not is_raised:
        return None
    message = _PASSING.sub("", failure.message)
    return RankError(kind=failure.kind, message=message, step=failure.step)
