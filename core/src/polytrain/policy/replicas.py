"""Which ranks hold something else than most, of what all ranks should hold alike. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence


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
        world_size: number of ranks.
        what: what differs.
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
