"""The time of day for records of a run: no correction of the machine's clock changes it."""

from __future__ import annotations

import time


class Clock:
    """The wall clock as it was when this clock began, plus the time since then.

    The time in which the machine was suspended doesn't count (Linux' CLOCK_MONOTONIC).
    """

    def __init__(self) -> None:
        self.began = time.time()
        """In seconds since the epoch."""

        self._began = time.monotonic()

    def now(self) -> float:
        """Return the time, in seconds since the epoch."""
        return self.began + time.monotonic() - self._began

    def ahead_s(self) -> float:
        """Return how far the machine's clock is ahead of this one: it was set, or suspended."""
        return time.time() - self.now()
