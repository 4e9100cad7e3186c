"""Finds the ranks of one attempt that hold the others up. Pure: no clock."""

from __future__ import annotations

from dataclasses import dataclass, field

from polytrain.events.health import Load
from polytrain.policy.straggler_policy import Straggler, stragglers

_REMEMBERED = 3
"""Windows that are kept: agents don't end them at the same instant."""


@dataclass(slots=True, kw_only=True)
class StragglerDetector:
    """How busy the worker processes of one attempt are, window by window."""

    attempt: int
    world_size: int
    _windows: dict[int, dict[int, float]] = field(default_factory=dict)
    """Window → rank → share of it for which the rank was busy."""

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
        """Return how busy each rank was in a window, in rank order; None unless all are known."""
        its = self._windows.get(window, {})
        return [its[rank] for rank in sorted(its)] if len(its) == self.world_size else None
