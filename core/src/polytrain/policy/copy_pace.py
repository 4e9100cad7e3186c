"""Decides at which steps a training's state is copied. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

_SHARE = 0.03
"""Maximum share of the time that "auto" spends on copies."""


@dataclass(slots=True, kw_only=True)
class CopyPace:
    """When the next copy is due. Times are in seconds, of one clock."""

    every: Literal["auto"] | int
    """Number of steps from copy to copy; "auto" goes by the time that copies take."""

    _steps: int = 0
    """Number of steps since the last copy."""

    _due_at: float = 0.0

    def is_due(self, now: float) -> bool:
        """Note a step; return whether the state after it is to be copied."""
        self._steps += 1
        return now >= self._due_at if self.every == "auto" else self._steps >= self.every

    def copied(self, began: float, ended: float) -> None:
        """Note that a copy was made, or tried, between these times."""
        self._steps = 0
        self._due_at = ended + (ended - began) * (1 / _SHARE - 1)
