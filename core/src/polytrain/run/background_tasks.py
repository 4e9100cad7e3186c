"""Slow tasks that run beside the controller: commits and deletions."""

from __future__ import annotations

import logging
import queue
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from typing import Any

from polytrain.checkpoint.parts import CheckpointEvent
from polytrain.errors import Failure, FailureKind
from polytrain.events.attempt import Event, Failed
from polytrain.events.driver import TaskEnded
from polytrain.workers.driver.group import Mailbox

logger = logging.getLogger(__name__)

BackgroundTask = Callable[[], Event | CheckpointEvent | None]
"""Returns its outcome. It turns expected errors into events."""


class BackgroundTasks:
    """Runs tasks one at a time, in order."""

    def __init__(self, *, mailbox: Mailbox, at_once: bool) -> None:
        """
        Args:
            mailbox: receives `TaskEnded` when `results` has an outcome.
            at_once: whether tasks run in the caller's thread.
        """
        self.at_once = at_once
        """Whether tasks run in the caller's thread."""

        self._mailbox = mailbox
        self._executor: Executor = (
            _AtOnce()
            if at_once
            else ThreadPoolExecutor(1, thread_name_prefix="polytrain-background")
        )
        self._results: queue.SimpleQueue[Event | CheckpointEvent] = queue.SimpleQueue()
        self._last: Future[None] | None = None
        self._last_needed: Future[None] | None = None
        """The last task that an attempt needs."""

    def submit(self, task: BackgroundTask, *, attempt: int | None = None) -> None:
        """Run a task.

        Args:
            task: the task. If it raises, the attempt fails.
            attempt: the attempt that needs it; None if none does, and an exception is only logged.
        """
        self._last = self._executor.submit(self._do, task, attempt)
        if attempt is not None:
            self._last_needed = self._last

    def results(self) -> Iterator[Event | CheckpointEvent]:
        """Yield the outcomes of the tasks that are finished now.

        Tasks that finish meanwhile wait for the next call: otherwise a rank that makes checkpoints
        without a pause would block the caller.
        """
        for _ in range(self._results.qsize()):
            yield self._results.get()

    @property
    def have_news(self) -> bool:
        """Whether a task that an attempt needs is unfinished, or nobody has taken an outcome."""
        is_busy = self._last_needed is not None and not self._last_needed.done()
        return is_busy or not self._results.empty()

    def finish_needed(self) -> None:
        """Wait until the tasks that an attempt needs are finished: no restart waits for others."""
        if self._last_needed is not None:
            wait([self._last_needed])

    def finish(self, *, within_s: float | None = None) -> bool:
        """Wait until all tasks are finished; return whether they are.

        Args:
            within_s: how many seconds to wait. By default there is no limit: unfinished work would
                be lost. Another signal interrupts the wait.
        """
        return self._last is None or bool(wait([self._last], within_s).done)

    def __enter__(self) -> BackgroundTasks:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        # After an error, wait only for the running task: pending deletions can be dropped.
        self._executor.shutdown(cancel_futures=error is not None)

    def _do(self, task: BackgroundTask, attempt: int | None) -> None:
        result: Event | CheckpointEvent | None
        try:
            result = task()
        except Exception as error:  # any error of a storage's client
            result = _failed(error, attempt)
        if result is not None:
            self._results.put(result)
            self._mailbox.put((TaskEnded(),))


def _failed(error: Exception, attempt: int | None) -> Failed | None:
    if attempt is None:
        logger.error("A background task has failed.", exc_info=error)
        return None
    failure = Failure(
        kind=FailureKind.STORAGE,
        rank=None,
        message=f"{type(error).__name__}: {error}",
        traceback="".join(traceback.format_exception(error)),
    )
    return Failed(attempt=attempt, failure=failure)


class _AtOnce(Executor):
    """Runs a submitted function before `submit` returns."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future
