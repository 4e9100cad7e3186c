"""Ctrl-C, SIGTERM and SIGHUP during a run: the first requests a stop, the second ends it at once.

A signal interrupts only what may be interrupted anywhere. While a run takes or releases its
resources, a signal waits: otherwise a thread or a process could stay that nobody knows of.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Literal

_NUMBERS = (signal.SIGHUP, signal.SIGTERM, signal.SIGINT)


class Interrupts:
    """What becomes of signals that come during a run."""

    def __init__(self, ask: Callable[[str], None]) -> None:
        """
        Args:
            ask: called with the first signal's name, from a signal handler. It may raise
                KeyboardInterrupt, if the run can't stop by itself.
        """
        self.ask = ask
        # Plain attributes, which are set without a call: no signal comes in between.
        self.phase: Literal["starting", "running", "ending"] = "starting"
        """A signal interrupts what runs, and waits while the run starts or ends."""

        self.waiting: int | None = None
        """A signal that nobody has followed so far."""

        self._has_asked = False

    def handle(self, number: int, _frame: FrameType | None = None) -> None:
        """Take a signal."""
        if number == signal.SIGHUP and self._has_asked:
            # Not a second request: the kernel and the shell both tell of a closed terminal.
            return
        if self.phase != "ending" and not self._has_asked:
            self._has_asked = True
            self.ask(signal.Signals(number).name)
        elif self.phase == "running":
            # What is released from now on isn't interrupted.
            self.phase = "ending"
            raise KeyboardInterrupt
        else:
            self.waiting = number

    @property
    def are_urgent(self) -> bool:
        """Whether a signal waits for the run's end: nothing else is worth waiting for."""
        return self.phase == "ending" and self.waiting is not None

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Let no signal interrupt this block. One that comes meanwhile interrupts what follows."""
        before, self.phase = self.phase, "starting"
        try:
            yield
        finally:
            self.phase = before
            self.raise_if_waiting()

    def raise_if_waiting(self) -> None:
        """Raise KeyboardInterrupt if a signal has waited and may interrupt what runs now."""
        if self.phase == "running" and self.waiting is not None:
            self.phase = "ending"
            raise KeyboardInterrupt


@contextmanager
def stop_requests(ask: Callable[[str], None]) -> Iterator[Interrupts]:
    """Make signals request a stop, unless the program handles or ignores them itself.

    In the end, a signal that nobody has followed gets to the handler of before.

    Args:
        ask: called with the first signal's name, from a signal handler.

    Raises:
        KeyboardInterrupt: at the second signal.
    """
    interrupts = Interrupts(ask)
    if threading.current_thread() is not threading.main_thread():
        # Only the main thread can handle signals.
        yield interrupts
        return
    before = {
        number: handler for number in _NUMBERS if _is_nobodys(handler := signal.getsignal(number))
    }
    for number in before:
        signal.signal(number, interrupts.handle)
    has_raised = True
    try:
        yield interrupts
        has_raised = False
    finally:
        interrupts.phase = "ending"
        for number, handler in before.items():
            signal.signal(number, handler)
        if interrupts.waiting is not None and not has_raised:
            signal.raise_signal(interrupts.waiting)


def _is_nobodys(handler: Any) -> bool:
    """Return whether a handler is Python's default, or the one that Ray sets."""
    if handler in (signal.SIG_DFL, signal.default_int_handler):
        return True
    return str(getattr(handler, "__module__", "")).partition(".")[0] == "ray"
