"""How busy the ranks were, for the journal: many windows become one line. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_BYTES_PER_S = 12.0
"""What these lines may add to a journal: 1 MB a day."""

_BYTES_PER_RANK = 18
"""A share and the bytes of a process's memory, as JSON."""


@dataclass(slots=True)
class LoadLines:
    """The windows of an attempt that no line has yet."""

    _due: float = 0.0
    """When the next line may be written, in seconds."""

    _windows: int = 0
    _newest: Mapping[str, int] = field(default_factory=dict)
    """Attempt and number of the newest window."""

    _busy: list[float] = field(default_factory=list)
    """Each rank's sum over the windows."""

    _memory: list[int] = field(default_factory=list)
    """The most of each rank."""

    def add(
        self, *, attempt: int, window: int, busy: Sequence[float], memory: Sequence[int], now: float
    ) -> Mapping[str, Any] | None:
        """Add a window of all ranks; return the fields of a line if one is due."""
        if not self._windows:
            self._busy, self._memory = [0.0] * len(busy), [0] * len(memory)
        self._windows += 1
        self._newest = {"attempt": attempt, "window": window}
        self._busy = [before + share for before, share in zip(self._busy, busy, strict=True)]
        self._memory = [max(pair) for pair in zip(self._memory, memory, strict=True)]
        if now < self._due:
            return None
        self._due = now + len(busy) * _BYTES_PER_RANK / _BYTES_PER_S
        return self.rest()

    def rest(self) -> Mapping[str, Any] | None:
        """Return the fields of a line with the windows that are left; None if none are.

        They are the number of windows, and each rank's mean share and most memory in them.
        """
        if not self._windows:
            return None
        shares = [round(share / self._windows, 2) for share in self._busy]
        line = {**self._newest, "windows": self._windows, "busy": shares, "memory": self._memory}
        self._windows = 0
        return line
