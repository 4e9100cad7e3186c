"""Excludes nodes that have lost workers, for a cool-down time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

_LOSSES = 2
"""Losses within the cool-down that exclude a node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """The loss of a worker: its node and its time."""

    node: str
    at: float


def avoided(losses: Sequence[Loss], *, cooldown_s: float, now: float) -> frozenset[str]:
    """Return the nodes that get no workers at this time.

    Args:
        losses: all losses of the run so far.
        cooldown_s: seconds for which a loss counts.
        now: seconds on the clock of the losses.
    """
    recent = Counter(loss.node for loss in losses if now - loss.at < cooldown_s)
    return frozenset(node for node, count in recent.items() if count >= _LOSSES)
