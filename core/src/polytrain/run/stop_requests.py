"""Requests to stop a run, from any thread or a signal handler, for the thread that drives it."""

from __future__ import annotations

import queue
from collections.abc import Callable

from polytrain_plugins import Stopped


class StopRequests:
    """Holds requests until the controller takes them; they may come before there is one."""

    def __init__(self) -> None:
        self._requests: queue.SimpleQueue[Stopped] = queue.SimpleQueue()
        self._wake: Callable[[], None] = _nobody

    def notify(self, wake: Callable[[], None]) -> None:
        """Call this function after each request from now on."""
        self._wake = wake

    def request(self, stopped: Stopped) -> None:
        """Ask the run to end after its next checkpoint."""
        self._requests.put(stopped)
        self._wake()

    def take(self) -> Stopped | None:
        """Return the next request; None if there is none."""
        try:
            return self._requests.get_nowait()
        except queue.Empty:
            return None


def _nobody() -> None:
    """Nobody waits for requests yet."""
