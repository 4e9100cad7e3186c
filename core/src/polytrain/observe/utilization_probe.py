"""Measures how busy a worker process is, window by window: does it work, or wait for others?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from polytrain.events.health import Load
from polytrain.linux.processes import busy_seconds, is_held, resident_bytes
from polytrain.linux.progress_page import Page

_MAX_PERIOD_S = 0.2
_LOOKS = 25
"""Minimum samples in a window. The kernel doesn't count the time that a process is held."""


class UtilizationProbe:
    """Measures one worker's main thread. Pure except for `look_at`: the caller has the clock.

    A thread is busy unless it waits for others: it runs, waits for a CPU or a device, or is stopped
    by a signal. All ranks have the same windows, because the last step of joining is a collective
    operation.
    """

    def __init__(self, *, attempt: int, rank: int, window_s: float, now: float) -> None:
        """
        Args:
            attempt: attempt of the worker process.
            rank: rank of the worker process.
            window_s: seconds of a window.
            now: start of the first window, in seconds.
        """
        self.period_s = min(_MAX_PERIOD_S, window_s / _LOOKS)
        self._attempt = attempt
        self._rank = rank
        self._window_s = window_s
        self._began = now
        self._window = -1
        self._opened = now
        self._beats = 0
        self._busy_s = 0.0
        self._looks = 0
        self._held = 0

    def look_at(self, now: float, page: Page, pid: int) -> Load | None:
        """Sample a running worker process."""
        load = self.look(
            now, beats=page.beats, is_held=is_held(pid), busy_s=lambda: busy_seconds(pid)
        )
        return None if load is None else replace(load, memory=resident_bytes(pid))

    def look(
        self, now: float, *, beats: int, is_held: bool, busy_s: Callable[[], float]
    ) -> Load | None:
        """Add a sample, and return the load if this ends a window.

        A window without progress has no load, nor has one whose end was missed because the whole
        machine was suspended.

        Args:
            now: time in seconds.
            beats: count of the worker process's progress so far.
            is_held: whether a signal or a device keeps it from running.
            busy_s: returns the seconds that it has run or waited for a CPU so far.
        """
        self._looks += 1
        self._held += is_held
        window = int((now - self._began) / self._window_s)
        if window == self._window:
            return None
        spent, load = busy_s(), None
        was_seen = self._window >= 0 and window == self._window + 1
        if was_seen and beats != self._beats:
            share = (spent - self._busy_s) / (now - self._opened) + self._held / self._looks
            load = Load(
                attempt=self._attempt,
                rank=self._rank,
                window=self._window,
                busy=min(1.0, max(0.0, share)),
            )
        self._window, self._opened, self._beats, self._busy_s = window, now, beats, spent
        self._looks = self._held = 0
        return load
