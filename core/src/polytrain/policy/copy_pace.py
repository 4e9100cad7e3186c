"""Decides at which steps a training's state is copied. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

_SHARE = 0.03
"""Maximum share of the time that "auto" spends on copies."""


@dataclass(slots=True, kw_only=True)
class CopyPace:
    """When the next copy is due. Times are in seconds, of one clock."""

    every: Literal["auto"] | int
    """Number of steps from copy to copy; "auto" goes by the time that copies take."""

    is_shared: bool = False
    """Whether several ranks copy at the same steps. Their clocks differ, so "auto" goes by steps:
    after 1, 2, 4, 8, … more of them, until the ranks agree on a number."""

    wanted: int = 0
    """The number of steps from copy to copy that keeps this rank's share; 0 if not known yet."""

    _steps: int = 0
    """Number of steps since the last copy."""

    _due_at: float = 0.0
    _interval: int = 1
    """Number of steps until the next copy of several ranks with "auto"."""

    _is_agreed: bool = False
    _ended: float | None = None
    """When the last copy ended; None before there was one."""

    def is_due(self, now: float) -> bool:
        """Note a step; return whether the state after it is to be copied."""
        self._steps += 1
        if self.every != "auto":
            return self._steps >= self.every
        return self._steps >= self._interval if self.is_shared else now >= self._due_at

    def copied(self, began: float, ended: float) -> None:
        """Note that a copy was made, or tried, between these times."""
        rest = (ended - began) * (1 / _SHARE - 1)
        if self._ended is not None:
            step = (began - self._ended) / self._steps
            self.wanted = max(1, math.ceil(rest / step)) if step > 0 else self._steps
        self._steps = 0
        self._due_at, self._ended = ended + rest, ended
        if not self._is_agreed:
            self._interval *= 2

    def agree(self, wanted: Sequence[int]) -> None:
        """Copy from now on as seldom as the slowest rank wants, once one knows.

        Args:
            wanted: `wanted` of all ranks, of which each calls this.
        """
        if any(wanted):
            self._is_agreed, self._interval = True, max(wanted)
