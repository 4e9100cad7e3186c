"""Which nodes have joined a run that trains, and can't begin to train.

They may lack a package, a library or memory, or be behind a firewall. They must not end a run that
continues without them. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from polytrain.errors import Failure, FailureKind
from polytrain.policy.failed_attempts import TRAINED_S, FailedAttempt, is_crash

_AT_THE_BEGINNING = (
    FailureKind.STARTUP,
    FailureKind.USER_ERROR,
    FailureKind.OUT_OF_MEMORY,
    FailureKind.WORKER_LOST,
)
"""Exceptions, and exits, by which a node shows that it can't begin to train."""

_IN_A_ROW = 5
"""Attempts in a row that end by such nodes and aren't counted: others may follow without end."""


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
