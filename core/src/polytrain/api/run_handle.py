"""The handle of a run that trains while the program does other things."""

from __future__ import annotations

import asyncio
import math
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any, Literal

from polytrain.api.result import Result
from polytrain.api.shown import Resumption, Row, as_html, as_text, line, warn
from polytrain.functions.users_code import user_frames_only
from polytrain.output.metric_texts import metrics_text
from polytrain.run.interrupts import stop_requests
from polytrain.run.requests import StopRequests
from polytrain.text.described import ShortRepr
from polytrain_plugins import Attempt, Outcome, Report, Stopped, hookimpl

REPORTS_KEPT = 10_000

_LONGEST_WAIT_S = 1.0
"""A signal that comes just before a wait begins doesn't interrupt it, and is handled after it."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RunStatus(ShortRepr):
    """What a run is doing."""

    state: Literal["starting", "training", "restarting", "finished", "stopped", "failed"]
    """"restarting" between two attempts; the last three when the run has ended."""

    attempt: int = 0
    """The attempt's number, from 0."""

    step: int = 0
    """The step of rank 0's newest report; 0 before the first one of this `fit()`."""

    metrics: dict[str, Any] = field(default_factory=dict)
    """The metrics of that report."""


class Watcher:
    """Follows a run as an observer, for threads that ask."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._status = RunStatus(state="starting")
        self._reports: deque[Report] = deque(maxlen=REPORTS_KEPT)
        self._count = 0
        self._ended = False

    @property
    def status(self) -> RunStatus:
        """The newest status."""
        with self._changed:
            return self._status

    @hookimpl
    def polytrain_attempt_started(self, attempt: Attempt) -> None:
        with self._changed:
            self._status = replace(self._status, state="training", attempt=attempt.number)

    @hookimpl
    def polytrain_reported(self, report: Report) -> None:
        with self._changed:
            metrics = dict(report.metrics)
            self._status = replace(self._status, step=report.step, metrics=metrics)
            self._reports.append(report)
            self._count += 1
            self._changed.notify_all()

    @hookimpl
    def polytrain_attempt_ended(self, outcome: Outcome) -> None:
        # After the last attempt, validations may be left.
        if outcome.succeeded or outcome.stopped is not None:
            return
        with self._changed:
            self._status = replace(self._status, state="restarting")

    def ended(self, state: Literal["finished", "stopped", "failed"]) -> None:
        """End all iterators."""
        with self._changed:
            self._status = replace(self._status, state=state)
            self._ended = True
            self._changed.notify_all()

    def reports(self) -> Iterator[Report]:
        """Yield the reports that are kept, and then each new one until the run has ended."""
        seen = 0
        while True:
            with self._changed:
                while self._count == seen and not self._ended:
                    # Without a limit: the caller wants what comes until the run has ended.
                    self._changed.wait()
                missed = min(self._count - seen, len(self._reports))
                new = [self._reports[index] for index in range(-missed, 0)]
                seen = self._count
            if not new:
                return
            yield from new


class RunHandle:
    """A run that trains in a thread of this process; `Trainer.fit(wait=False)` returns it.

    `await handle` is `handle.result()` for asyncio. Cancelling the task that awaits doesn't stop
    the run. If the program ends meanwhile, Python waits for the run's end first; after Ctrl-C that
    is its next checkpoint, and after another one it is at once.
    """

    def __init__(
        self,
        train: Callable[[Watcher], Result],
        *,
        name: str,
        requests: StopRequests,
        resumption: Resumption,
    ) -> None:
        self._resumption = resumption
        self._name = name
        self._requests = requests
        self._watcher = Watcher()
        self._future: Future[Result] = Future()
        # Then `cancel`, which asyncio calls with the task that awaits, has no effect.
        self._future.set_running_or_notify_cancel()
        # Not a daemon: the interpreter would end it in the middle of the run.
        self._thread = threading.Thread(target=self._train, args=(train,), name=f"polytrain {name}")
        self._thread.start()
        # What is registered stays so: a run keeps its handle by its thread, and only until its end.
        _call_at_exit(_weakly(self._end_with_program))

    def __repr__(self) -> str:
        title, rows = self._shown()
        return as_text(f"RunHandle of {title}", rows)

    def _repr_html_(self) -> str:
        return as_html(*self._shown())

    def _shown(self) -> tuple[str, list[Row]]:
        status = self.status()
        restarts = str(status.attempt) if status.attempt else ""
        rows = [("restarts", restarts), ("metrics", metrics_text(status.metrics))]
        step = [("step", str(status.step))] if status.step else []
        return f"{line(self._name, 40)}: {status.state}", [*step, *rows]

    def _train(self, train: Callable[[Watcher], Result]) -> None:
        try:
            result = train(self._watcher)
        except BaseException as error:  # whatever it is, `result()` raises it
            self._watcher.ended("failed")
            self._future.set_exception(error)
        else:
            self._watcher.ended("finished" if result.finished else "stopped")
            self._future.set_result(result)

    def _end_with_program(self) -> None:
        # An exception that nobody has caught is here once its traceback is printed. At a prompt it
        # hasn't ended the program, and may be old.
        was_interrupted = not hasattr(sys, "ps1") and isinstance(
            getattr(sys, "last_value", None), KeyboardInterrupt
        )
        if not self._future.done() and (was_interrupted or not self._ends_after(lambda: None)):
            stopped = Stopped(by="signal", reason="SIGINT")
            if not self._ends_after(lambda: self._requests.request(stopped)):
                self._ends_after(self._requests.end_at_once)
            self._explain("SIGINT")
        self._thread.join()

    def _ends_after(self, call: Callable[[], None]) -> bool:
        """Call something, and wait for the run's end; return whether it comes before Ctrl-C."""
        try:
            call()
            # Not for the thread: one whose `join` was interrupted counts as ended.
            while not self._future.done():
                wait([self._future], _LONGEST_WAIT_S)
        except KeyboardInterrupt:
            return False
        return True

    def stop(self, reason: str = "") -> None:
        """Ask the run to end after its next checkpoint, and return at once.

        The result then has `finished=False`, and `stopped` with this reason. Nothing happens if the
        run has ended.
        """
        if not isinstance(reason, str):
            raise TypeError(f"reason has to be text, not {reason!r}")
        self._requests.request(Stopped(by="handle", reason=reason))

    @user_frames_only
    def result(self, timeout: float | None = None) -> Result:
        """Wait for the run's end, and return its result.

        In the main thread, Ctrl-C, SIGTERM or SIGHUP during the wait stops the run after its next
        checkpoint. Then, or at the timeout, an exception ends the program, as by `Trainer.fit`. A
        second signal ends the wait at once, not the run.

        Args:
            timeout: seconds to wait at most; without one, there is no limit.

        Raises:
            TimeoutError: the run hasn't ended in this time; it continues.
            TrainingFailedError: as by `Trainer.fit`, and so are all others.
            KeyboardInterrupt: after Ctrl-C.
            SystemExit: after SIGTERM (code 143) or SIGHUP (129).
        """

        def ask(signal_name: str) -> bool:
            self._requests.request(Stopped(by="signal", reason=signal_name))
            return True

        if timeout is not None and not isinstance(timeout, int | float):
            raise TypeError(f"timeout has to be a number of seconds or None, not {timeout!r}")
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        with stop_requests(ask, explain=self._explain) as interrupts, interrupts.allowed():
            while not self._future.done() and (left_s := deadline - time.monotonic()) > 0:
                wait([self._future], min(left_s, _LONGEST_WAIT_S))
        if not self._future.done():
            raise TimeoutError(
                f"The run {self._name} hasn't ended within {timeout} s, and continues. Wait again "
                "with result(), or end it with stop()."
            )
        return self._future.result()

    def _explain(self, signal_name: str) -> None:
        if not self._future.done():
            warn(f"{self._resumption.address}: the program ends after the run's next checkpoint.")
            return
        error = self._future.exception()
        has_failed = not isinstance(error, KeyboardInterrupt | None)
        result = None if error is not None else self._future.result()
        warn(self._resumption.after(signal_name, result, has_failed=has_failed))

    def status(self) -> RunStatus:
        """Return what the run is doing now."""
        return self._watcher.status

    def reports(self) -> Iterator[Report]:
        """Iterate over rank 0's reports of this `fit()`, until the run has ended.

        Each call begins with the earliest. Of more than 10,000 the newest are kept for an iterator
        that is behind; `Result.history` has all. A restart reports some steps again. A failure
        ends the iterator; `result()` raises it.
        """
        return self._watcher.reports()

    def __await__(self) -> Generator[Any, None, Result]:
        return asyncio.wrap_future(self._future).__await__()


def _weakly(method: Callable[[], None]) -> Callable[[], None]:
    """Return a function that calls a method as long as its object exists, and doesn't keep it."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        found = reference()
        if found is not None:
            found()

    return call


def _call_at_exit(wait: Callable[[], None]) -> None:
    """Have the interpreter wait for a run while thread pools still work.

    Python closes all pools before it waits for threads, and calls `atexit` after both. So the run
    would fail at its next use of a pool, and nothing public comes earlier: this is what the pools
    themselves use. Functions are called in reverse order: the pools have to be registered before.
    """
    import_module("concurrent.futures.thread")
    register: Callable[[Callable[[], None]], None] = vars(threading)["_register_atexit"]
    register(wait)
