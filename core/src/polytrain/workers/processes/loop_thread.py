"""Runs an event loop on its own thread, and calls beside it that may hang."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

_ENDS_WITHIN_S = 10.0

_T = TypeVar("_T")


def in_daemon_thread(
    function: Callable[..., _T], *arguments: Any, else_here: bool = False
) -> asyncio.Future[_T]:
    """Call a function on a thread of its own, for which the program doesn't wait when it ends.

    It does for those of `asyncio.to_thread`, and what they read may be on a server that is gone.

    Args:
        else_here: whether to call it on the event loop if the system refuses the thread.

    Raises:
        RuntimeError: the system refuses the thread, as in a container that limits their number.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[_T] = loop.create_future()

    def conclude(settle: Callable[[], None]) -> None:
        if not outcome.done():
            settle()

    def call() -> None:
        settle: Callable[[], None]
        try:
            settle = partial(outcome.set_result, function(*arguments))
        except BaseException as error:  # whoever waits for the outcome gets it
            settle = partial(outcome.set_exception, error)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(conclude, settle)

    try:
        threading.Thread(target=call, name="polytrain-call", daemon=True).start()
    except RuntimeError:
        if not else_here:
            raise
        call()
    return outcome


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
