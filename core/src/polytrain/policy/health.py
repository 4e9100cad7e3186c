"""Which nodes get no workers for a while, because they keep losing them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

_LOSSES = 2
"""Losses within the cool-down after which a node is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A worker that was lost on a node, and when."""

    node: str
    at: float


def avoided(losses: Sequence[Loss], *, cooldown_s: float, now: float) -> frozenset[str]:
    """The nodes that are to be left out at this time.

    Args:
        losses: of the run so far.
        cooldown_s: seconds for which a loss counts.
        now: on the clock of the losses.
    """
    recent = Counter(loss.node for loss in losses if now - loss.at < cooldown_s)
    return frozenset(node for node, count in recent.items() if count >= _LOSSES)
