"""The values at the ends of a parameter's range."""

from __future__ import annotations

from collections.abc import Iterator

from polytrain.boosting.problems import Range


def values_at_the_ends(allowed: Range) -> Iterator[tuple[float, bool]]:
    """Yield values at and beside each end, and whether they are in the range."""
    if allowed.above is not None:
        yield allowed.above, False
        yield allowed.above + 0.125, True
    if allowed.least is not None:
        yield allowed.least - 1, False
        yield allowed.least, True
    if allowed.most is not None:
        yield allowed.most, True
        yield allowed.most + 1, False
    if allowed.below is not None:
        yield allowed.below - 0.125, True
        yield allowed.below, False
