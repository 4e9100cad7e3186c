"""How busy a worker process is, window by window: whether it works, or waits for the others."""

from __future__ import annotations

from collections.abc import Callable

from polytrain.common.processes import busy_seconds, is_held
from polytrain.monitoring.health_events import Load
from polytrain.monitoring.progress_page import Page

_MAX_PERIOD_S = 0.2
_LOOKS = 25
"""In a window, at least: the kernel counts the time on a CPU, but not the time that is held."""


class UtilizationProbe:
    """Measures one worker's main thread. Pure but for `look_at`: clock and looks are the caller's.

    Busy is what isn't a wait for somebody else: to run, to stand in the queue for a CPU, to be
    stopped by a signal, to wait for a device. The ranks' windows are the same ones, because what
    they do last before they have joined is a collective operation.
    """

    def __init__(self, *, attempt: int, rank: int, window_s: float, now: float) -> None:
        """
        Args:
            attempt: the worker process's.
            rank: the worker process's.
            window_s: length of a window.
            now: when the first one begins, in seconds.
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
        """Look at a running worker process once more."""
        return self.look(
            now, beats=page.beats, is_held=is_held(pid), busy_s=lambda: busy_seconds(pid)
        )

    def look(
        self, now: float, *, beats: int, is_held: bool, busy_s: Callable[[], float]
    ) -> Load | None:
        """Look once more; how busy it was in the window that this look ends, if it ends one.

        Nothing is said of a window without progress, nor of one whose end nobody has seen because
        the whole machine stood still.

        Args:
            now: when.
            beats: how often the worker process has made progress by now.
            is_held: whether it can't go on, through no fault of its peers.
            busy_s: asks for the seconds that it has run or stood in the queue for a CPU until now.
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
