"""How busy the ranks were, for the journal: many windows become one line. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from polytrain.record.entries import LoadMeasured

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
    _newest: LoadMeasured | None = None
    _busy: list[float] = field(default_factory=list)
    """Each rank's sum over the windows."""

    _memory: list[int] = field(default_factory=list)
    """The most of each rank."""

    def add(self, window: LoadMeasured) -> LoadMeasured | None:
        """Add a window of all ranks; return an entry for the journal if one is due."""
        if not self._windows:
            self._busy, self._memory = [0.0] * len(window.busy), [0] * len(window.memory)
        self._windows += 1
        self._newest = window
        self._busy = [sum(pair) for pair in zip(self._busy, window.busy, strict=True)]
        self._memory = [max(pair) for pair in zip(self._memory, window.memory, strict=True)]
        if window.time < self._due:
            return None
        self._due = window.time + len(window.busy) * _BYTES_PER_RANK / _BYTES_PER_S
        return self.rest()

    def rest(self) -> LoadMeasured | None:
        """Return an entry with the windows that are left; None if none are.

        It has the number of windows, and each rank's mean share and most memory in them.
        """
        if self._newest is None or not self._windows:
            return None
        shares = [round(share / self._windows, 2) for share in self._busy]
        entry = replace(
            self._newest, windows=self._windows, busy=shares, memory=tuple(self._memory)
        )
        self._windows = 0
        return entry
