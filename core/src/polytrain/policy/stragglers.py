"""Finds the stragglers of one attempt: ranks that work while the others wait for them. Pure.

Ranks that train together take their steps at the same rate, because they wait for each other. The
straggler is the rank that never waits.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from polytrain.events.attempt import Load

_BUSY = 0.8
"""Minimum share of a window during which a straggler is busy."""

_OTHERS = 0.6
"""Maximum busy time of the others, as a share of the straggler's."""

_MANY = 4
"""Number of ranks from which a few others may be busy too."""

_REMEMBERED = 3
"""Number of windows to keep: agents don't end them at the same instant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A rank that the others wait for."""

    rank: int
    busy: float
    """Share of the last window during which it was busy."""

    others: float
    """Share of the last window during which the other ranks were busy."""

    def reason(self, *, host: str, window_s: float) -> str:
        """Return why it is a straggler, for people."""
        return (
            f"rank {self.rank} on host {host} holds the others up: it was busy for "
            f"{self.busy:.0%} of the last {window_s:g} s, the others for {self.others:.0%}"
        )


def stragglers(
    before: Mapping[int, float], last: Mapping[int, float], *, world_size: int
) -> list[Straggler]:
    """Return the ranks that held up the others in both of two windows.

    Args:
        before: rank → busy share of the last window but one, from 0 to 1.
        last: rank → busy share of the last window.
        world_size: number of ranks. If a window lacks some, there is no straggler.
    """
    if world_size < 2 or not len(before) == len(last) == world_size:
        return []
    earlier = _stand_out(before)
    return [straggler for rank, straggler in _stand_out(last).items() if rank in earlier]


def _stand_out(busy: Mapping[int, float]) -> dict[int, Straggler]:
    # Most windows have no suspects, which makes this cheap for any number of ranks.
    suspects = [rank for rank in sorted(busy) if busy[rank] >= _BUSY]
    found = {}
    if 0 < len(suspects) <= len(busy) / 2:
        shares = sorted(busy.values())
        for rank in suspects:
            typical = _typical_of_others(shares, busy[rank])
            if typical <= _OTHERS * busy[rank]:
                found[rank] = Straggler(rank=rank, busy=busy[rank], others=typical)
    return found


def _typical_of_others(shares: Sequence[float], own: float) -> float:
    """Return how busy the others are."""
    place, others = bisect_left(shares, own), len(shares) - 1

    def other(index: int) -> float:
        return shares[index if index < place else index + 1]

    if len(shares) < _MANY:
        return other(others - 1)
    return (other((others - 1) // 2) + other(others // 2)) / 2


@dataclass(slots=True, kw_only=True)
class StragglerDetector:
    """Records how busy the worker processes of one attempt are, window by window."""

    attempt: int
    world_size: int
    _windows: dict[int, dict[int, float]] = field(default_factory=dict)
    """Window → rank → share of the window during which the rank was busy."""

    _named: set[int] = field(default_factory=set)
    """Stragglers that were reported already."""

    def take(self, load: Load) -> list[Straggler]:
        """Record a rank's window; return the stragglers that it shows, each once."""
        if load.attempt != self.attempt:
            return []
        window = self._windows.setdefault(load.window, {})
        window[load.rank] = load.busy
        if len(window) < self.world_size:
            return []
        before = self._windows.get(load.window - 1, {})
        newest = max(self._windows)
        self._windows = {w: its for w, its in self._windows.items() if w > newest - _REMEMBERED}
        found = [
            straggler
            for straggler in stragglers(before, window, world_size=self.world_size)
            if straggler.rank not in self._named
        ]
        self._named |= {straggler.rank for straggler in found}
        return found

    def shares(self, window: int) -> list[float] | None:
        """Return each rank's busy share of a window, in rank order; None unless all are known."""
        its = self._windows.get(window, {})
        return [its[rank] for rank in sorted(its)] if len(its) == self.world_size else None
