"""Ctrl-C, SIGTERM and SIGHUP during a run: the first requests a stop, the second ends it at once.

A signal interrupts only waits and the user's own code. Elsewhere it is deferred until then:
otherwise it could leave a thread or a process without an owner.

A signal is meant for the program, not for the run alone: when the run has ended, the program gets
the exception that it would have got without polytrain.
"""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Literal, NoReturn

from polytrain.output.echo import leave_gone_terminal
from polytrain.storage.calls import PATIENCE_S

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

        self.first: int | None = None
        """The first signal: it decides which exception the program gets."""

    def handle(self, number: int, _frame: FrameType | None = None) -> None:
        """Handle a signal."""
        if number == signal.SIGHUP:
            leave_gone_terminal()
        is_first = self.first is None
        if is_first:
            self.first = number
        elif number == signal.SIGHUP:
            # Not a second request: kernel and shell both send SIGHUP for a closed terminal.
            return
        if is_first and self.phase != "ending" and self.ask(signal.Signals(number).name):
            return
        self.waiting = number
        self._raise_if_allowed()

    def end_at_once(self) -> None:
        """Interrupt the run's next wait, from another thread: the run's own gets no signals."""
        self.waiting = signal.SIGINT

    @property
    def are_urgent(self) -> bool:
        """Whether a deferred signal wants to end the run: don't wait for anything else."""
        return self.waiting is not None

    @property
    def patience_s(self) -> float:
        """How many seconds to wait at most for a storage that doesn't answer."""
        if self.are_urgent:
            return 0.0
        return math.inf if self.first is None else PATIENCE_S

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
def stop_requests(
    ask: Callable[[str], bool], *, explain: Callable[[str], None] = lambda name: None
) -> Iterator[Interrupts]:
    """Make signals request a stop, unless the program handles or ignores them itself.

    A signal that has come ends the program at the end of this block, however the block ends. An
    error of the block is then the exception's cause.

    Args:
        ask: see `Interrupts`.
        explain: called with the first signal's name before its exception is raised.

    Raises:
        KeyboardInterrupt: the first signal was SIGINT.
        SystemExit: it was SIGTERM or SIGHUP; the code is 128 and its number, as in a shell.
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
    cause: BaseException | None = None
    try:
        yield interrupts
    except BaseException as error:
        if interrupts.first is None:
            raise
        cause = error
    finally:
        interrupts.phase = "ending"
        for number, handler in before.items():
            signal.signal(number, handler)
    if interrupts.first is not None:
        explain(signal.Signals(interrupts.first).name)
        _end_program(interrupts.first, cause)


def _end_program(number: int, cause: BaseException | None) -> NoReturn:
    interrupted = cause if isinstance(cause, KeyboardInterrupt) else None
    if number == signal.SIGINT:
        # Of an inline run it has the line of the training function.
        raise (interrupted or KeyboardInterrupt()) from (None if interrupted else cause)
    raise SystemExit(128 + number) from (None if interrupted else cause)


def _is_nobodys(handler: Any) -> bool:
    """Return whether a handler is Python's default, or the one that Ray sets."""
    if handler in (signal.SIG_DFL, signal.default_int_handler):
        return True
    return str(getattr(handler, "__module__", "")).partition(".")[0] == "ray"
