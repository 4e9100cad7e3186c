"""Ctrl-C and SIGTERM during a run: the first requests a stop, the second ends it at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def stop_requests(ask: Callable[[str], None]) -> Iterator[None]:
    """Make signals request a stop, unless the program handles them itself.

    Args:
        ask: called with the signal's name, from a signal handler.

    Raises:
        KeyboardInterrupt: at the second signal.
    """
    if threading.current_thread() is not threading.main_thread():
        # Only the main thread can handle signals.
        yield
        return
    asked = False

    def handle(number: int, _frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        ask(signal.Signals(number).name)

    before = {
        number: handler
        for number in (signal.SIGINT, signal.SIGTERM)
        if _is_nobodys(handler := signal.getsignal(number))
    }
    for number in before:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_nobodys(handler: Any) -> bool:
    """Return whether a handler is Python's default, or the one that Ray sets."""
    if handler in (signal.SIG_DFL, signal.default_int_handler):
        return True
    return str(getattr(handler, "__module__", "")).partition(".")[0] == "ray"
