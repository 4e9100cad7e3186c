"""The clock for records of a run, which corrections of the machine's clock don't affect."""

from __future__ import annotations

import time


class Clock:
    """The wall clock at the start of this clock, plus the monotonic time since then.

    Time during which the machine was suspended doesn't count (Linux's CLOCK_MONOTONIC).
    """

    def __init__(self) -> None:
        self.began = time.time()
        """Wall-clock time of the start, in seconds since the epoch."""

        self._began = time.monotonic()

    def now(self) -> float:
        """Return the time, in seconds since the epoch."""
        return self.began + time.monotonic() - self._began

    def ahead_s(self) -> float:
        """Return the seconds by which the machine's clock is ahead: it was set or suspended."""
        return time.time() - self.now()
