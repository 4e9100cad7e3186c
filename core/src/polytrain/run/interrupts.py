"""Ctrl-C, SIGTERM and SIGHUP during a run: the first requests a stop, the second ends it at once.

A signal interrupts only waits and the user's own code. Elsewhere it is deferred until then:
otherwise it could leave a thread or a process without an owner.
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
    """Handles signals during a run: requests a stop, defers or interrupts."""

    def __init__(self, ask: Callable[[str], bool] = lambda name: True) -> None:
        """
        Args:
            ask: called with the first signal's name, from a signal handler. It returns whether the
                run can stop by itself.
        """
        self.ask = ask
        # Plain attributes are set without a call, so no signal can interrupt the assignment.
        self.phase: Literal["deferred", "allowed", "ending"] = "deferred"
        """Whether a signal interrupts the running code; at most one does."""

        self.waiting: int | None = None
        """A signal that hasn't been acted on yet."""

        self._has_asked = False

    def handle(self, number: int, _frame: FrameType | None = None) -> None:
        """Handle a signal."""
        if number == signal.SIGHUP and self._has_asked:
            # Not a second request: kernel and shell both send SIGHUP for a closed terminal.
            return
        if self.phase != "ending" and not self._has_asked:
            self._has_asked = True
            if self.ask(signal.Signals(number).name):
                return
        self.waiting = number
        self._raise_if_allowed()

    @property
    def are_urgent(self) -> bool:
        """Whether a deferred signal wants to end the run: don't wait for anything else."""
        return self.waiting is not None

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Defer signals during this block. One that arrives interrupts the code after it."""
        before = self.phase
        if before != "ending":
            self.phase = "deferred"
        try:
            yield
        finally:
            self._back_to(before)

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Let a signal interrupt this block, including a deferred one.

        Raises:
            KeyboardInterrupt: a signal has arrived.
        """
        before = self.phase
        if before != "ending":
            self.phase = "allowed"
        self._raise_if_allowed()
        try:
            yield
        finally:
            self._back_to(before)

    def _back_to(self, before: Literal["deferred", "allowed", "ending"]) -> None:
        if self.phase != "ending":
            self.phase = before
        self._raise_if_allowed()

    def _raise_if_allowed(self) -> None:
        if self.phase == "allowed" and self.waiting is not None:
            # No signal interrupts the release of resources from here on.
            self.phase, self.waiting = "ending", None
            raise KeyboardInterrupt


@contextmanager
def stop_requests(ask: Callable[[str], bool]) -> Iterator[Interrupts]:
    """Make signals request a stop, unless the program handles or ignores them itself.

    At the end, a signal that wasn't acted on is passed to the previous handler.

    Args:
        ask: see `Interrupts`.

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
