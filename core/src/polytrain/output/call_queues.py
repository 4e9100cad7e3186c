"""Makes calls that may block on threads of their own, so that the caller never waits.

A terminal may be held (Ctrl-S), a pipe's reader may have stopped, a disk may hang, and an observer
may do anything. The run continues: each queue is bounded, and drops calls that exceed the bound.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TextIO

from polytrain.config.loop_config import name_of
from polytrain.output.echo import write_text

logger = logging.getLogger(__name__)

KEPT = 64 << 20
"""Maximum bytes that wait for one target, by the sizes that callers give."""

_STUCK_AFTER_S = 2.0
"""Seconds without a finished call after which the end of a run stops waiting."""

_END_WITHIN_S = 30.0
"""Maximum seconds that the end of a run waits for a slow target."""

_GUARDED_SIZE = 1000
"""Bytes that each call of a user's object counts while it waits."""

Call = Callable[[], None]


class CallQueue:
    """Makes calls on its own thread, in order.

    A call that raises is logged. A call that never returns blocks the thread, which then ends with
    the program.
    """

    def __init__(
        self,
        name: str,
        *,
        left_out: Callable[[int], None],
        kept: int = KEPT,
        context: contextvars.Context | None = None,
        is_urgent: Callable[[], bool] = lambda: False,
    ) -> None:
        """
        Args:
            name: name of the thread, which starts with the first call.
            left_out: called with the number of dropped calls, in their place.
            kept: maximum total size of waiting calls, in the unit of their sizes.
            context: context of the calls; by default this thread's.
            is_urgent: returns whether the program wants to end without waiting.
        """
        self._left_out_call = left_out
        self._kept = kept
        self._is_urgent = is_urgent
        self._calls: queue.SimpleQueue[tuple[Call | None, int]] = queue.SimpleQueue()
        # Reentrant: a signal handler may give a call while this thread gives one.
        self._lock = threading.RLock()
        self._given = self._made = self._left_out = 0
        self._calls_given = self._calls_made = 0
        self._stuck_at_call = -1
        self._tick: Call | None = None
        self._pauses: Iterator[float] = iter(())
        # A notebook's kernel assigns output to a cell by the context.
        run = (contextvars.copy_context() if context is None else context.copy()).run
        self._thread = threading.Thread(target=run, args=(self._work,), name=name, daemon=True)
        self._is_started = False

    def submit(self, call: Call, *, size: int = 1) -> None:
        """Queue a call, or drop it if the queue is full.

        Args:
            size: its size, which counts towards `kept` while it waits.
        """
        with self._lock:
            if self._given - self._made + size > self._kept:
                self._left_out += 1
                return
            self._tell_what_was_left_out()
            self._put(call, size)

    def repeat(self, tick: Call, pauses: Iterator[float]) -> None:
        """Call a function repeatedly, until it raises.

        Args:
            pauses: seconds before each call. After the last one there are no more calls.
        """
        self._pauses, self._tick = pauses, tick
        self.submit(_nothing)

    def stop_repeating(self) -> None:
        """Stop the repeated calls."""
        self._tick = None

    def finish(
        self, *, stuck_after_s: float = _STUCK_AFTER_S, within_s: float = _END_WITHIN_S
    ) -> bool:
        """Wait until all queued calls are made; return whether they are.

        Args:
            stuck_after_s: seconds without a finished call after which to stop waiting.
            within_s: maximum seconds to wait.
        """
        done = threading.Event()
        with self._lock:
            self._tell_what_was_left_out()
            if self._calls_given == self._calls_made:
                return True
            self._put(done.set, 0)
        return self._is_over(done.wait, stuck_after_s, within_s)

    def close(
        self, *, stuck_after_s: float = _STUCK_AFTER_S, within_s: float = _END_WITHIN_S
    ) -> bool:
        """Wait as `finish` does, and end the thread once all calls are made."""
        self.stop_repeating()
        if not self._is_started:
            return True
        with self._lock:
            self._tell_what_was_left_out()
            self._calls.put((None, 0))

        def is_ended(timeout_s: float) -> bool:
            self._thread.join(timeout_s)
            return not self._thread.is_alive()

        return self._is_over(is_ended, stuck_after_s, within_s)

    def _is_over(
        self, wait: Callable[[float], bool], stuck_after_s: float, within_s: float
    ) -> bool:
        now, made = time.monotonic(), self._calls_made
        end = now + within_s
        # If an earlier wait gave up at the same call, don't wait again.
        stuck_at = now if made == self._stuck_at_call else now + stuck_after_s
        # Wait in short steps: a signal that makes the end urgent doesn't interrupt a wait.
        while not wait(max(0.0, min(0.1, end - now, stuck_at - now))):
            now = time.monotonic()
            if self._calls_made != made:
                stuck_at, made = now + stuck_after_s, self._calls_made
            if now >= min(end, stuck_at) or self._is_urgent():
                self._stuck_at_call = self._calls_made
                return False
        return True

    def _put(self, call: Call, size: int) -> None:
        self._given += size
        self._calls_given += 1
        self._calls.put((call, size))
        if not self._is_started:
            self._is_started = True
            self._thread.start()

    def _tell_what_was_left_out(self) -> None:
        if self._left_out:
            count, self._left_out = self._left_out, 0
            self._put(lambda: self._left_out_call(count), 0)

    def _work(self) -> None:
        repeated, next_at = None, math.inf
        while True:
            if repeated is not self._tick:
                repeated, next_at = self._tick, _after(self._pauses)
            left_s = next_at - time.monotonic()
            if repeated is not None and left_s <= 0:
                next_at = _after(self._pauses) if self._do(repeated) else math.inf
                continue
            wait_s = None if repeated is None or left_s == math.inf else left_s
            try:
                call, size = self._calls.get(timeout=wait_s)
            except queue.Empty:
                continue
            if call is None:
                return
            self._do(call)
            self._made += size
            self._calls_made += 1

    def _do(self, call: Call) -> bool:
        try:
            call()
        except BaseException:  # any error concerns only this target
            logger.exception("What a run shows of itself has failed; the run continues.")
            return False
        return True


class CallQueues:
    """The queues of a run: one per target, which is a terminal, pipe, file or other object."""

    def __init__(
        self,
        *,
        is_urgent: Callable[[], bool] = lambda: False,
        at_once: bool = False,
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """
        Args:
            is_urgent: returns whether the program wants to end without waiting.
            at_once: whether calls are made in the thread that gives them.
        """
        self._is_urgent = is_urgent
        self._at_once = at_once
        self._around = around
        self._context = contextvars.copy_context()
        self._lock = threading.RLock()
        self._queues: dict[Hashable, CallQueue] = {}

    def of(self, target: Any, *, left_out: Callable[[int], None] | None = None) -> CallQueue:
        """Return the queue of a target.

        Args:
            target: a stream, or any other object. Streams to the same file share a queue, which
                keeps their output in order.
            left_out: see `CallQueue`. By default a stream gets a line with the number.
        """
        key = _key(target)
        with self._lock:
            if key not in self._queues:
                self._queues[key] = (
                    _AtOnce(self._around)
                    if self._at_once
                    else CallQueue(
                        f"polytrain calls {len(self._queues)}",
                        left_out=left_out or partial(_tell_of_lines, target),
                        context=self._context,
                        is_urgent=self._is_urgent,
                    )
                )
            return self._queues[key]

    def unfinished(self, targets: Iterable[Any], *, within_s: float) -> list[Any]:
        """Wait for the calls of some targets; return the targets with unfinished calls.

        Args:
            targets: objects that were passed to `of`.
            within_s: seconds to wait for all of them.
        """
        end = time.monotonic() + within_s

        def is_finished(target: Any) -> bool:
            left_s = max(0.0, end - time.monotonic())
            return self.of(target).finish(stuck_after_s=left_s, within_s=left_s)

        return [target for target in targets if not is_finished(target)]

    def __enter__(self) -> CallQueues:
        return self

    def __exit__(self, *_: object) -> None:
        for each in list(self._queues.values()):
            each.close()


class GuardedCalls:
    """Calls users' objects on their own queues; one that raises is logged and not called again."""

    def __init__(self, kind: str, queues: CallQueues) -> None:
        """
        Args:
            kind: what the objects are, for messages.
        """
        self._kind = kind
        self._queues = queues
        self._broken: set[int] = set()

    def submit(
        self, target: Any, where: str, call: Call, *, queues: CallQueues | None = None
    ) -> None:
        """Queue a call of an object.

        Args:
            where: the name of what is called, for messages.
            queues: other queues than usual.
        """
        queue = (queues or self._queues).of(target, left_out=partial(self._warn_of_calls, target))
        queue.submit(partial(self._make, target, where, call), size=_GUARDED_SIZE)

    def finish(self, targets: Iterable[Any], *, within_s: float) -> None:
        """Wait until all calls of these objects are made, for a limited time."""
        for target in self._queues.unfinished(targets, within_s=within_s):
            logger.warning(
                "The %s %r hasn't taken all calls within %g s of the run's end. It gets the others "
                "for as long as this program runs.",
                self._kind,
                name_of(target),
                within_s,
            )

    def _make(self, target: Any, where: str, call: Call) -> None:
        if id(target) in self._broken:
            return
        try:
            call()
        except (Exception, SystemExit):
            logger.exception(
                "The %s %r raised in %s and is not called again; the run continues.",
                self._kind,
                name_of(target),
                where,
            )
            self._broken.add(id(target))

    def _warn_of_calls(self, target: Any, count: int) -> None:
        logger.warning(
            "The %s %r is slower than the run, and misses %d calls. The run continues.",
            self._kind,
            name_of(target),
            count,
        )


class _AtOnce(CallQueue):
    """Makes each call before `submit` returns, without a thread."""

    def __init__(self, around: Callable[[], AbstractContextManager[None]]) -> None:
        super().__init__("", left_out=lambda count: None)
        self._around = around

    def submit(self, call: Call, *, size: int = 1) -> None:
        with self._around():
            call()


def _after(pauses: Iterator[float]) -> float:
    return time.monotonic() + next(pauses, math.inf)


def _key(target: Any) -> Hashable:
    try:
        status = os.fstat(target.fileno())
    except Exception:  # it isn't a stream, or has no descriptor
        return id(target)
    return status.st_dev, status.st_ino


def _tell_of_lines(stream: TextIO, count: int) -> None:
    lines = "1 line of output was" if count == 1 else f"{count} lines of output were"
    with contextlib.suppress(OSError, ValueError):  # the reader may be gone
        write_text(stream, f"[polytrain: {lines} left out here: nobody has read fast enough]\n")


def _nothing() -> None:
    """Do nothing: the call only wakes the thread."""
