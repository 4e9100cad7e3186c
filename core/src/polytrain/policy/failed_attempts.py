"""What is known of failed attempts: their cause, to compare it with others', and unfit nodes. Pure.

Unfit nodes have joined a run that trains, and can't begin to train. They may lack a package, a
library or memory, or be behind a firewall. They must not end a run that continues without them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from polytrain.errors import Failure, FailureKind
from polytrain.events.attempt import Diverged

TRAINED_S = 30.0
"""An attempt that lasts this long counts as trained, even without a report."""

BUGS = frozenset(
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

RAISED = (
    FailureKind.USER_ERROR,
    FailureKind.CHECKPOINT_MISMATCH,
    FailureKind.OUT_OF_MEMORY,
)
"""Failures that the user's own code raises."""

OF_THE_CODE = (
    FailureKind.USER_ERROR,
    FailureKind.CHECKPOINT_MISMATCH,
    FailureKind.STARTUP,
)
"""Failures that may come of the code alone, without a step that they depend on."""

_PASSING = re.compile(
    r"0x[0-9a-fA-F]+|[\[|]\d\d:\d\d:\d\d\]|\[?(?:\d{1,3}\.){3}\d{1,3}\]?:\d+|\[[0-9a-f:]*::?[0-9a-f:]*\]:\d+"
)
"""Parts in which messages of equal errors differ: object addresses, times, hosts with ports."""

NOT_JOINED = "before it had joined the others: "
"""Begins the message of an exception that a rank raised before it trained."""

AFTER_WAIT = ", also after a wait"
"""Part of the message of a failure of a disk that is full: another attempt would wait as long."""

_FRAME = re.compile(r'^ *File "(.*)", line (\d+), in ', re.MULTILINE)
"""A line of a traceback that names a place in the code."""

_CRASH = re.compile(r"killed by SIG(?:SEGV|BUS|ILL|FPE|ABRT|TRAP|SYS)|exited with code (?!143\b)")
"""Exits that a process causes itself, unlike SIGKILL and SIGTERM. By custom, a process that handles
SIGTERM exits with code 143."""

_AT_THE_BEGINNING = (
    FailureKind.STARTUP,
    FailureKind.USER_ERROR,
    FailureKind.OUT_OF_MEMORY,
    FailureKind.WORKER_LOST,
)
"""Exceptions, and exits, by which a node shows that it can't begin to train."""

_IN_A_ROW = 5
"""Attempts in a row that end by such nodes and aren't counted: others may follow without end."""


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
        is_bug = self.kind in OF_THE_CODE and type_of(self.message) in BUGS
        if later.step == self.step and (is_bug or self.kind is not FailureKind.STARTUP):
            is_equal = (self.kind, self.message) == (later.kind, later.message)
            return is_equal or self.cause == later.cause
        is_behind = later.step < self.step or later.step - nearer <= self.step < later.step
        return is_bug and is_behind and self.cause == later.cause

    @property
    def cause(self) -> tuple[Any, ...]:
        """What errors of the same cause have in common: of an exception the type and the calls."""
        if self.place and (self.kind in RAISED or self.kind in OF_THE_CODE):
            return self.kind, type_of(self.message), self.place
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

    unfit: frozenset[str] = frozenset()
    """Nodes that had just joined the run, and couldn't begin; empty if that is counted."""

    diverged: Diverged | None = None
    """What a rank's report has shown, if training has diverged."""

    @property
    def has_trained(self) -> bool:
        """Whether it got beyond its start: it reported a step, or lasted long enough."""
        return self.has_reported or self.lasted_s >= TRAINED_S

    @property
    def is_charged(self) -> bool:
        """Whether it counts towards `max_failures`."""
        is_free = self.root.kind in (FailureKind.PREEMPTED, FailureKind.DIVERGED)
        return not (is_free or self.unfit)

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


def is_crash(how: str) -> bool:
    """Return whether a process has ended by itself.

    Args:
        how: begins with how it ended.
    """
    return _CRASH.match(how) is not None


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


def type_of(message: str) -> str:
    """Return the type of the exception that a failure's message begins with, without its module."""
    return message.removeprefix(NOT_JOINED).partition(":")[0].rpartition(".")[2]


def unfit_nodes(
    failed: FailedAttempt,
    failures: Sequence[Failure],
    *,
    nodes: Sequence[str],
    trained_on: Set[str],
    left: Set[str],
    trained_s: float,
) -> frozenset[str]:
    """Return the nodes that have ended an attempt because they can't begin to train.

    An error that other nodes have too isn't caused by them.

    Args:
        failures: all of the attempt.
        nodes: the node of each rank.
        trained_on: nodes on which an attempt of the run has reported.
        left: nodes that the run has left for good.
        trained_s: seconds from the last rank's joining to the first failure; negative if some
            rank hasn't joined.
    """
    root = failed.root
    joined = frozenset(nodes) - trained_on - left
    if failed.has_reported or failed.on_every_rank or not trained_on:
        return frozenset()
    if root.kind not in _AT_THE_BEGINNING:
        return frozenset()
    # Ranks may wait for each other, and load, for as long as the limits allow.
    if root.kind is not FailureKind.STARTUP and trained_s >= TRAINED_S:
        return frozenset()
    if root.kind is FailureKind.WORKER_LOST and not is_crash(root.message):
        return frozenset()
    if root.rank is None and not root.late:
        # Several ranks haven't joined each other.
        return joined
    ranks = set(root.late)
    for failure in failures:
        # A lost process makes its peers fail, and so does a rank's own exception.
        is_own = not root.kind.is_loss and failure.kind is not FailureKind.CONNECTION_LOST
        if failure.rank is not None and (failure is root or is_own):
            ranks.add(failure.rank)
    found = frozenset(nodes[rank] for rank in ranks if rank < len(nodes))
    return found if found <= joined else frozenset()


def are_too_many(before: Sequence[FailedAttempt]) -> bool:
    """Return whether so many attempts have just ended by unfit nodes that the next one counts."""
    last = before[-_IN_A_ROW:]
    return len(last) == _IN_A_ROW and all(attempt.unfit for attempt in last)


def _error_of(failure: Failure) -> RankError | None:
    """Return the error to compare between attempts; None if its cause is external."""
    crashed = failure.kind is FailureKind.WORKER_LOST and is_crash(failure.message)
    # A rank raises it if its disk is full or read-only. Agents' uploads fail for what may pass.
    # A rank raises an error of its start if its code does; others' resources may come.
    may_pass = failure.kind in (FailureKind.STORAGE, FailureKind.STARTUP)
    is_raised = may_pass and failure.traceback
    if failure.kind is FailureKind.HANG:
        # Its message says how long nothing has happened, and on which ranks.
        who = "all" if failure.rank is None else f"rank {failure.rank}"
        return RankError(kind=failure.kind, message=who, step=failure.step)
    known = (*RAISED, FailureKind.CONNECTION_LOST, FailureKind.REPLICAS_DIFFER)
    if failure.kind not in known and not crashed and not is_raised:
        return None
    message = _PASSING.sub("", failure.message)
    place = tuple(_FRAME.findall(failure.traceback))
    return RankError(kind=failure.kind, message=message, step=failure.step, place=place)
