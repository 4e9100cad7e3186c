"""A thread that calls a function again and again until it is closed."""

from __future__ import annotations

import contextvars
import logging
import threading
from collections.abc import Callable, Iterator
from types import TracebackType

_CLOSE_WITHIN_S = 2.0
"""A terminal whose output is held (Ctrl-S) holds the thread; the run's end doesn't wait for it."""

logger = logging.getLogger(__name__)


class Ticker:
    """Calls a function after each of some pauses. One that raises is logged, and not called again.

    As a context manager, it calls only within the `with` block.
    """

    def __init__(self, tick: Callable[[], None], pauses: Iterator[float], *, name: str) -> None:
        """
        Args:
            tick: the function.
            pauses: seconds before each call. With the last one, calls end.
            name: of the thread.
        """
        self._tick = tick
        self._pauses = pauses
        self._closed = threading.Event()
        # A notebook's kernel finds the cell that output belongs to by the context.
        run = contextvars.copy_context().run
        self._thread = threading.Thread(target=run, args=(self._run,), name=name, daemon=True)

    def __enter__(self) -> Ticker:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._closed.set()
        self._thread.join(_CLOSE_WITHIN_S)

    def _run(self) -> None:
        for pause_s in self._pauses:
            if self._closed.wait(pause_s):
                return
            try:
                self._tick()
            except Exception:
                logger.exception("A run's progress can't be shown any more; the run continues.")
                return
