"""Decides whether a failed attempt is restarted.

Rules are evaluated in order; the first that returns a decision wins. A rule is a pure function of
a run's failed attempts, the latest last.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise, product
from typing import Any, Literal

from polytrain.errors import Failure, FailureKind
from polytrain.events.attempt import Diverged

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
every rank, and so does what passes: a service that doesn't answer, or a process that is gone."""

_TIMES = 3
"""Consecutive attempts that may end by the same exception of another type, wherever it comes."""

_BAD_DATA = frozenset({"BadDataError"})
"""Exceptions that reject the data, which the next attempt reads again."""

_PASSING = re.compile(
    r"0x[0-9a-fA-F]+|[\[|]\d\d:\d\d:\d\d\]|\[?(?:\d{1,3}\.){3}\d{1,3}\]?:\d+|\[[0-9a-f:]*::?[0-9a-f:]*\]:\d+"
)
"""Parts in which messages of equal errors differ: object addresses, times, hosts with ports."""

NOT_JOINED = "before it had joined the others: "
"""Begins the message of an exception that a rank raised before it trained."""

_FRAME = re.compile(r'^ *File "(.*)", line (\d+), in ', re.MULTILINE)
"""A line of a traceback that names a place in the code."""

_CRASH = re.compile(r"killed by SIG(?:SEGV|BUS|ILL|FPE|ABRT|TRAP|SYS)|exited with code")
"""Exits that a process causes itself, unlike SIGKILL and SIGTERM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankError:
    """An error in a form that can be compared between attempts."""

    kind: FailureKind
    message: str
    step: int
    place: tuple[tuple[str, str], ...] = field(default=(), compare=False)
    """File and line of each call that led to it; empty if it isn't an exception."""

    def comes_again_in(self, later: RankError, *, nearer: int = 0) -> bool:
        """Whether a later error has the same cause, and is known to come each time.

        A bug comes again if its rank gets no further, wherever it came earlier. What may come from
        outside, such as a broken connection, has to come at the same step. Before the first step
        that says nothing.

        Args:
            nearer: by how many steps a survivor's state let the later attempt begin nearer to it.
                These aren't the rank's own progress.
        """
        is_bug = self.kind in _OF_THE_CODE and _type_of(self.message) in _BUGS
        if later.step == self.step and (is_bug or self.kind is not FailureKind.STARTUP):
            is_equal = (self.kind, self.message) == (later.kind, later.message)
            return is_equal or self.cause == later.cause
        is_behind = later.step < self.step or later.step - nearer <= self.step < later.step
        return is_bug and is_behind and self.cause == later.cause

    @property
    def cause(self) -> tuple[Any, ...]:
        """What errors of the same cause have in common: of an exception the type and the calls."""
        if self.place and (self.kind in _RAISED or self.kind in _OF_THE_CODE):
            return self.kind, _type_of(self.message), self.place
        return self.kind, self.message


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedAttempt:
    """Summary of a failed attempt."""

    root: Failure
    on_every_rank: bool = False
    """Whether all ranks have raised the same exception at the same step."""

    errors: frozenset[RankError] = frozenset()
    """Errors of all ranks that may recur."""

    progress: int = 0
    """Step of the newest reported checkpoint when all processes were gone; 0 if there was none.
    What a failed attempt has left is none, be it a survivor's state, copies, or a report that was
    being made: it only saves what would be repeated."""

    rescued: int = 0
    """How many steps after `progress` the attempt began, with what a failed one had left."""

    has_reported: bool = True
    lasted_s: float = 0.0
    """Seconds from its launch to its first failure."""

    nodes: frozenset[str] = frozenset()
    """Nodes on which processes were lost."""

    diverged: Diverged | None = None
    """What a rank's report has shown, if training has diverged."""

    @property
    def has_trained(self) -> bool:
        """Whether it got beyond its start: it reported a step, or lasted long enough."""
        return self.has_reported or self.lasted_s >= _TRAINED_S

    @property
    def is_charged(self) -> bool:
        """Whether it counts towards `max_failures`."""
        return self.root.kind not in (FailureKind.PREEMPTED, FailureKind.DIVERGED)

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
    on_divergence: Literal["rollback", "fail"] | None = None
    max_rollbacks: int = 0
    rollbacks: tuple[str, ...] = ()
    """Those of earlier drivers, as text for people."""

    leaves_out: bool = False
    """Whether a rollback leaves batches out."""

    def only_discards(self, diverged: Diverged) -> bool:
        """Return whether after a divergence the run only discards a survivor's state.

        No report has shown that state to be good, so no batch is left out yet: the next attempt
        finds what diverges. That is no rollback.
        """
        return self.leaves_out and not diverged.found.skipped and not diverged.problem

    def decide(self, attempts: Attempts) -> Decision:
        """Decide about the latest failure.

        Args:
            attempts: every failed attempt of the run, the latest last; not empty.
        """
        rules: tuple[Rule, ...] = (
            some_kinds_decide,
            self._divergence_is_rolled_back,
            self._user_errors_are_retried,
            self._repeated_errors_end_the_run,
            failed_starts_are_limited,
            losses_are_counted_once,
            self._failures_are_counted,
        )
        decisions = (rule(attempts) for rule in rules)
        return next(decision for decision in decisions if decision is not None)

    def _divergence_is_rolled_back(self, attempts: Attempts) -> Decision | None:
        """Go back, at most `max_rollbacks` times, unless the run is to end."""
        latest, diverged = attempts[-1], attempts[-1].diverged
        if latest.root.kind is not FailureKind.DIVERGED or diverged is None:
            return None
        if self.on_divergence != "rollback":
            return Decision(restart=False, reason=f"on_divergence={self.on_divergence!r}")
        if diverged.problem:
            return Decision(restart=False, reason=diverged.problem)
        if self.only_discards(diverged):
            return Decision(
                restart=True,
                reason="the state of a survivor, with which the attempt began, is discarded: no "
                "report has shown it to be good",
            )
        own = [
            each.root
            for each in attempts
            if each.root.kind is FailureKind.DIVERGED
            and each.diverged is not None
            and not self.only_discards(each.diverged)
        ]
        known = [*self.rollbacks, *(f"step {each.step}: {each.message}" for each in own)]
        count = f"rollback {len(known)} of max_rollbacks={self.max_rollbacks}"
        if len(known) <= self.max_rollbacks:
            without = diverged.found.without
            also = f", without {without}" if without else ""
            return Decision(restart=True, reason=f"{count}{also}")
        before = "; ".join(known[:-1])
        return Decision(
            restart=False, reason=f"{count}: none is left" + (f", after {before}" if before else "")
        )

    def _user_errors_are_retried(self, attempts: Attempts) -> Decision | None:
        """End the run by an exception of the user's code that would come again."""
        latest = attempts[-1]
        if latest.root.kind not in _RAISED or self.retry_user_errors is True:
            return None
        if self.retry_user_errors is False and latest.root.kind is not FailureKind.OUT_OF_MEMORY:
            return Decision(
                restart=False, reason="retry_user_errors=False: exceptions aren't retried"
            )
        if _type_of(latest.root.message) in _BAD_DATA:
            return Decision(restart=False, reason="not retried, because the data would be the same")
        if latest.on_every_rank and _type_of(latest.root.message) in _BUGS:
            return Decision(
                restart=False,
                reason="not retried, because every rank raised it: it would come again",
            )
        return None

    def _repeated_errors_end_the_run(self, attempts: Attempts) -> Decision | None:
        """End the run if an error recurs without progress: a bug.

        It may occur on any rank, and needn't be the root cause of all attempts. If a reported
        checkpoint was committed in between, or the rank got further, the run has made progress,
        and the rule doesn't apply. After a start from a survivor's state, a rank got further if it
        would have without that state: if it reported more steps than it would have repeated. An
        exception that may pass ends the run only if it comes several times in a row.
        """
        if self.retry_user_errors is True or len(attempts) < 2:
            return None
        before, latest = attempts[-2:]
        if latest.progress > before.progress:
            return None
        nearer = max(0, latest.rescued - before.rescued)
        pairs = product(before.errors, latest.errors)
        repeated = next(
            (pair for pair in pairs if pair[0].comes_again_in(pair[1], nearer=nearer)), None
        )
        which = "the attempt before had the same error at step"
        if repeated is not None:
            then, now = (f"{error.step}" for error in repeated)
        else:
            steps = _steps_of_one_cause(attempts[-_TIMES:])
            if steps is None:
                return None
            which = f"the {_TIMES - 1} attempts before had the same error at steps"
            then, now = " and ".join(map(str, steps[:-1])), f"{steps[-1]}"
        further = "" if now in then.split() else f", and this one came only to step {now}"
        if further and latest.rescued:
            further += f", {latest.rescued} of which a survivor's state had spared it"
        return Decision(
            restart=False,
            reason=f"not retried, because {which} {then}{further}: it would come again",
        )

    def _failures_are_counted(self, attempts: Attempts) -> Decision | None:
        """Restart after at most `max_failures` failures in a row; -1 means any number.

        A reported checkpoint that was committed since the failure before is progress, which a
        failure can't undo: the count begins again. After a survivor's state it doesn't: each
        failure has one.
        """
        failures, since = _counted(attempts)
        if self.max_failures < 0:
            return Decision(restart=True, reason=f"failure {failures}, max_failures is unlimited")
        if self.max_failures == 0:
            return Decision(restart=False, reason="max_failures=0 allows no restart")
        progress = f" since the checkpoint of step {since}" if since else ""
        count = f"failure {failures} of max_failures={self.max_failures}{progress}"
        if failures <= self.max_failures:
            return Decision(restart=True, reason=count)
        return Decision(restart=False, reason=f"{count}: no restart is left")


ENDS_BY = {
    FailureKind.LEASE_LOST: "this driver has lost its lease on the run",
    FailureKind.VALIDATION: "ValidationConfig(on_failure='fail') ends the run",
}
"""Failures that no other attempt could undo, and how they end a run: without the lease it would
disturb the driver that holds it, and a validated checkpoint stays as it is."""


def some_kinds_decide(attempts: Attempts) -> Decision | None:
    """Decide by the kind of the failure. A node that is removed with notice costs nothing."""
    kind = attempts[-1].root.kind
    if kind in ENDS_BY:
        return Decision(restart=False, reason=ENDS_BY[kind])
    if kind is FailureKind.PREEMPTED:
        return Decision(restart=True, reason="a preemption isn't counted as a failure")
    return None


def _steps_of_one_cause(attempts: Attempts) -> tuple[int, ...] | None:
    """Return the steps at which an exception has ended so many attempts without progress.

    None if there is none.
    """
    if len(attempts) < _TIMES or attempts[-1].progress > attempts[0].progress:
        return None
    furthest: list[dict[tuple[Any, ...], int]] = []
    for attempt in attempts:
        steps: dict[tuple[Any, ...], int] = {}
        for error in attempt.errors:
            if error.kind in _OF_THE_CODE:
                steps[error.cause] = max(error.step, steps.get(error.cause, 0))
        furthest.append(steps)
    for cause in furthest[-1]:
        if all(cause in steps for steps in furthest):
            found = tuple(steps[cause] for steps in furthest)
            # What a survivor's state has spared a rank isn't its own progress.
            *before, latest = (
                step - attempt.rescued for step, attempt in zip(found, attempts, strict=True)
            )
            if latest <= max(before):
                return found
    return None


def failed_starts_are_limited(attempts: Attempts) -> Decision | None:
    """Limit attempts that end before they train, or they might never stop."""
    if len(attempts) < _START_FAILURES or any(
        attempt.has_trained for attempt in attempts[-_START_FAILURES:]
    ):
        return None
    return Decision(
        restart=False, reason=f"{_START_FAILURES} attempts in a row have ended before they trained"
    )


def losses_are_counted_once(attempts: Attempts) -> Decision | None:
    """Restart without a charge if the loss is the one that has ended the attempt before."""
    if len(attempts) < 2 or not attempts[-1].is_late_news_of(attempts[-2]):
        return None
    return Decision(
        restart=True, reason="what ended the attempt before has ended this one, and is counted once"
    )


def _counted(attempts: Attempts) -> tuple[int, int]:
    """Return the number of charged failures since the last progress, and its checkpoint's step.

    The step is 0 if no failure before has been freed.
    """
    failures, since = int(attempts[0].is_charged), 0
    for before, latest in pairwise(attempts):
        if latest.progress > before.progress and failures:
            failures, since = 0, latest.progress
        failures += latest.is_charged and not latest.is_late_news_of(before)
    return failures, since


_RAISED = (
    FailureKind.USER_ERROR,
    FailureKind.CHECKPOINT_MISMATCH,
    FailureKind.OUT_OF_MEMORY,
)
"""Failures that the user's own code raises."""

_OF_THE_CODE = (
    FailureKind.USER_ERROR,
    FailureKind.CHECKPOINT_MISMATCH,
    FailureKind.STARTUP,
)
"""Failures that may come of the code alone, without a step that they depend on."""


def failed_attempt(
    failures: Sequence[Failure], *, world_size: int, nodes: Sequence[str] = ()
) -> FailedAttempt:
    """Sum up the failures of one attempt.

    Args:
        failures: failures in the order of their reports; not empty.
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


def _type_of(message: str) -> str:
    """Return the type of the exception that a failure's message begins with, without its module."""
    return message.removeprefix(NOT_JOINED).partition(":")[0].rpartition(".")[2]


def _error_of(failure: Failure) -> RankError | None:
    """Return the error to compare between attempts; None if its cause is external."""
    is_crash = failure.kind is FailureKind.WORKER_LOST and _CRASH.match(failure.message)
    # A rank raises it if its disk is full or read-only. Agents' uploads fail for what may pass.
    # A rank raises an error of its start if its code does; others' resources may come.
    may_pass = failure.kind in (FailureKind.STORAGE, FailureKind.STARTUP)
    is_raised = may_pass and failure.traceback
    if failure.kind is FailureKind.HANG:
        # Its message says how long nothing has happened, and on which ranks.
        who = "all" if failure.rank is None else f"rank {failure.rank}"
        return RankError(kind=failure.kind, message=who, step=failure.step)
    known = (*_RAISED, FailureKind.CONNECTION_LOST, FailureKind.REPLICAS_DIFFER)
    if failure.kind not in known and not is_crash and not is_raised:
        return None
    message = _PASSING.sub("", failure.message)
    place = tuple(_FRAME.findall(failure.traceback))
    return RankError(kind=failure.kind, message=message, step=failure.step, place=place)
