"""Slow tasks that run beside the controller: commits and deletions."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

from polytrain.checkpoint.events import CheckpointEvent
from polytrain.common.events import Event

BackgroundTask = Callable[[], Event | CheckpointEvent | None]
"""Says what has come of it, and never raises."""


class BackgroundTasks:
    """Does chores one after another, in the order in which they were given."""

    def __init__(self, *, wake: Callable[[], None], at_once: bool) -> None:
        """
        Args:
            wake: called when there is something in `results`, from whatever thread.
            at_once: do them in the caller's thread.
        """
        self._wake = wake
        self._executor: Executor = (
            _AtOnce() if at_once else ThreadPoolExecutor(1, thread_name_prefix="polytrain-chores")
        )
        self._results: queue.SimpleQueue[Event | CheckpointEvent] = queue.SimpleQueue()
        self._last: Future[None] | None = None

    def give(self, task: BackgroundTask) -> None:
        """Have something done."""
        self._last = self._executor.submit(self._do, task)

    def results(self) -> Iterator[Event | CheckpointEvent]:
        """What has come of those that are done."""
        while not self._results.empty():
            yield self._results.get()

    def finish(self) -> None:
        """Wait until all are done."""
        if self._last is not None:
            self._last.result()

    def __enter__(self) -> BackgroundTasks:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # A deletion that nobody waits for needn't be finished; one that is being done is.
        self._executor.shutdown(cancel_futures=error is not None)

    def _do(self, task: BackgroundTask) -> None:
        result = task()
        if result is not None:
            self._results.put(result)
            self._wake()


class _AtOnce(Executor):
    """Runs what is submitted before `submit` returns."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future
