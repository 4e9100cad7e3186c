"""Compares what all ranks should hold alike, and says which ranks hold something else."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Hashable, Sequence

from polytrain.errors import ReplicasDifferError

_OTHERS_ERROR_S = 60.0
"""Seconds for which a rank waits for the error of one that differs, before it raises its own."""

logger = logging.getLogger(__name__)


class Replicas:
    """Compares digests of all ranks, during one attempt."""

    def __init__(self, *, rank: int, raises: bool) -> None:
        """
        Args:
            raises: whether a difference is an error; otherwise rank 0 warns of the first.
        """
        self._rank = rank
        self._raises = raises
        self._has_warned = False

    def compare(self, by_rank: Sequence[bytes], what: str, *, step: int) -> None:
        """Compare the digests before a step is reported; see `worker_api.compare_replicas`."""
        odd = odd_ranks(by_rank)
        if not odd:
            return
        why = why_odd(odd, len(by_rank), what)
        if self._raises:
            is_here = self._rank in odd
            if not is_here:
                # The other's error is the cause: it ends the attempt, and this process with it.
                threading.Event().wait(_OTHERS_ERROR_S)
            raise ReplicasDifferError(
                f"At step {step} {why}", is_here=None if len(odd) == len(by_rank) else is_here
            )
        if self._rank == 0 and not self._has_warned:
            logger.warning(
                "At step %d %s. RunConfig(digests=…) ends the attempt where ranks differ, and "
                "continues on other nodes.",
                step,
                why,
            )
        self._has_warned = True


def odd_ranks(by_rank: Sequence[Hashable]) -> tuple[int, ...]:
    """Return the ranks that differ from most; all ranks if no value is that of more than half.

    Args:
        by_rank: each rank's value; not empty.
    """
    [(usual, count)] = Counter(by_rank).most_common(1)
    if 2 * count <= len(by_rank):
        return tuple(range(len(by_rank)))
    return tuple(rank for rank, value in enumerate(by_rank) if value != usual)


def why_odd(odd: Sequence[int], world_size: int, what: str) -> str:
    """Return what is wrong, for people.

    Args:
        odd: from `odd_ranks`; not empty.
    """
    if len(odd) == world_size:
        return (
            f"the ranks hold different values of {what}, which should be the same on all: a rank "
            "computes wrongly, and too few agree to tell which"
        )
    ranks = f"{'rank' if len(odd) == 1 else 'ranks'} {', '.join(map(str, odd))}"
    return (
        f"{ranks} of {world_size} {'holds' if len(odd) == 1 else 'hold'} other values of {what} "
        "than the others, which should be the same on all: a machine may compute wrongly"
    )
