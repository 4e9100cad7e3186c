"""Runs an event loop on its own thread."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any

logger = logging.getLogger(__name__)

_ENDS_WITHIN_S = 10.0


class LoopThread:
    """Runs coroutines for other threads until it is closed."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, None]) -> Future[None]:
        """Run a coroutine, without waiting for it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call a function on the loop, without waiting for it."""
        self._loop.call_soon_threadsafe(function, *arguments)

    def close(self, timeout_s: float = _ENDS_WITHIN_S) -> None:
        """Cancel running coroutines, and end the thread.

        A stuck thread is left behind, and doesn't keep the process from ending.

        Args:
            timeout_s: seconds to wait for the thread's end.
        """
        # Submit first: the thread then ends even if this wait is interrupted.
        self.submit(self._end())
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.warning(
                "The thread %s hasn't ended within %g s, and is left behind. It is at:\n%s",
                self._thread.name,
                timeout_s,
                self._stack(),
            )

    def _run(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        self._loop.stop()

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "".join(traceback.format_stack(frame)).rstrip()
