"""Decides whether a failed attempt is restarted.

Rules are evaluated in order; the first that returns a decision wins. A rule is a pure function of
a run's failed attempts, the latest last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, product, takewhile
from typing import Any

from polytrain.config.configs import FailureConfig
from polytrain.errors import FailureKind
from polytrain.events.attempt import Diverged
from polytrain.policy.failed_attempts import (
    AFTER_WAIT,
    BUGS,
    OF_THE_CODE,
    RAISED,
    FailedAttempt,
    is_crash,
    type_of,
)

_START_FAILURES = 5
"""Consecutive attempts that may end before they train; then the run ends."""

_PAUSE_S = 1.0
"""Seconds between the second failed start in a row and the next; later pauses are twice as long."""

_FROM_OUTSIDE = (
    FailureKind.PREEMPTED,
    FailureKind.AGENT_LOST,
    FailureKind.NODE_LOST,
    FailureKind.DIVERGED,
)
"""Failures that say nothing about the next start."""

_TIMES = 3
"""Consecutive attempts that may end by the same exception of another type, wherever it comes."""

_BAD_DATA = frozenset({"BadDataError"})
"""Exceptions that reject the data, which the next attempt reads again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The decision whether to restart, and its reason."""

    restart: bool
    reason: str
    pause_s: float = 0.0
    """Seconds to wait before the restart."""


Attempts = Sequence[FailedAttempt]
Rule = Callable[[Attempts], Decision | None]
"""None leaves the decision to the next rule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailurePolicy:
    """The rules of a user's configuration."""

    config: FailureConfig = field(default_factory=FailureConfig)
    rollbacks: tuple[str, ...] = ()
    """Those of earlier drivers, as text for people."""

    def only_discards(self, diverged: Diverged) -> bool:
        """Return whether after a divergence the run only discards a survivor's state.

        No report has shown that state to be good, so no batch is left out yet: the next attempt
        finds what diverges. That is no rollback.
        """
        return self.config.skips_bad_batches and not diverged.found.skipped and not diverged.problem

    def decide(self, attempts: Attempts) -> Decision:
        """Decide about the latest failure.

        Args:
            attempts: every failed attempt of the run, the latest last; not empty.
        """
        rules: tuple[Rule, ...] = (
            some_kinds_decide,
            full_disks_end_the_run,
            self._divergence_is_rolled_back,
            self._user_errors_are_retried,
            unfit_nodes_are_left,
            self._repeated_errors_end_the_run,
            failed_starts_are_limited,
            losses_are_counted_once,
            self._failures_are_counted,
        )
        decisions = (rule(attempts) for rule in rules)
        decision = next(decision for decision in decisions if decision is not None)
        pause_s = _pause_s(attempts) if decision.restart else 0.0
        if not pause_s:
            return decision
        reason = f"{decision.reason}; the next attempt begins in {pause_s:g} s"
        return replace(decision, reason=reason, pause_s=pause_s)

    def _divergence_is_rolled_back(self, attempts: Attempts) -> Decision | None:
        """Go back, at most `max_rollbacks` times, unless the run is to end."""
        latest, diverged = attempts[-1], attempts[-1].diverged
        if latest.root.kind is not FailureKind.DIVERGED or diverged is None:
            return None
        if self.config.on_divergence != "rollback":
            return Decision(restart=False, reason=f"on_divergence={self.config.on_divergence!r}")
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
        count = f"rollback {len(known)} of max_rollbacks={self.config.max_rollbacks}"
        if len(known) <= self.config.max_rollbacks:
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
        if latest.root.kind not in RAISED or self.config.retry_user_errors is True:
            return None
        if (
            self.config.retry_user_errors is False
            and latest.root.kind is not FailureKind.OUT_OF_MEMORY
        ):
            return Decision(
                restart=False, reason="retry_user_errors=False: exceptions aren't retried"
            )
        if type_of(latest.root.message) in _BAD_DATA:
            return Decision(restart=False, reason="not retried, because the data would be the same")
        if latest.on_every_rank and type_of(latest.root.message) in BUGS:
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
        if self.config.retry_user_errors is True or len(attempts) < 2:
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
        if self.config.max_failures < 0:
            return Decision(restart=True, reason=f"failure {failures}, max_failures is unlimited")
        if self.config.max_failures == 0:
            return Decision(restart=False, reason="max_failures=0 allows no restart")
        progress = f" since the checkpoint of step {since}" if since else ""
        count = f"failure {failures} of max_failures={self.config.max_failures}{progress}"
        if failures <= self.config.max_failures:
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


def full_disks_end_the_run(attempts: Attempts) -> Decision | None:
    """End the run by a disk that has stayed full: the next attempt would wait as long for room."""
    root = attempts[-1].root
    if root.kind is not FailureKind.STORAGE or AFTER_WAIT not in root.message:
        return None
    return Decision(
        restart=False,
        reason="not retried, because room was waited for. Make room, and start the run again",
    )


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
            if error.kind in OF_THE_CODE:
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
    """Limit attempts that end before they train, or they might never stop.

    One that ended as planned, to resize or move, may have trained in between.
    """
    latest = attempts[-_START_FAILURES:]
    if (
        len(latest) < _START_FAILURES
        or any(attempt.has_trained for attempt in latest)
        or latest[-1].progress > latest[0].progress
    ):
        return None
    return Decision(
        restart=False, reason=f"{_START_FAILURES} attempts in a row have ended before they trained"
    )


def _pause_s(attempts: Attempts) -> float:
    """Return how long to wait for what starts fail of, such as a service; 0.0 after the first."""
    failed = list(takewhile(_is_failed_start, reversed(attempts)))
    return _PAUSE_S * 2 ** (len(failed) - 2) if len(failed) > 1 else 0.0


def _is_failed_start(attempt: FailedAttempt) -> bool:
    """Return whether an attempt has ended by itself before it trained."""
    if attempt.has_trained or attempt.unfit or attempt.root.kind in _FROM_OUTSIDE:
        return False
    return attempt.root.kind is not FailureKind.WORKER_LOST or is_crash(attempt.root.message)


def unfit_nodes_are_left(attempts: Attempts) -> Decision | None:
    """Restart without a charge if nodes that have joined the run can't begin: it leaves them."""
    unfit = attempts[-1].unfit
    if not unfit:
        return None
    node, gets = ("a node", "It gets") if len(unfit) == 1 else (f"{len(unfit)} nodes", "They get")
    return Decision(
        restart=True,
        reason=f"not counted: {node} on which the run hadn't trained before couldn't begin. {gets} "
        "no workers any more if others have room",
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
