"""Runs a rank's operations, which wait for other ranks, in the order of their calls.

An operation runs in the caller's thread, which is fastest. If other ranks are late, it continues in
a background thread and the call returns: a late rank may need this one for something else first.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

_PATIENCE_S = 0.05
"""Seconds that a call waits for other ranks before its operation moves to the thread."""

Operation = Iterator[float]
"""Runs while it is iterated, and yields the seconds of its current wait."""


def operations_begun() -> int:
    """Return the number of operations that this rank has begun in this attempt."""
    return _begun


def forget_operations() -> None:
    """Count from 0 again, in the next attempt."""
    global _begun
    _begun = 0


_begun = 0


class OperationQueue:
    """The operations of one process group on this rank."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._late: deque[tuple[Operation, torch.futures.Future[Any], Any]] = deque()
        """Operations of the background thread, which ends when there are none."""

        self._failed: Exception | None = None

    def run(self, operation: Operation, result: Any, *, blocks: bool) -> torch.futures.Future[Any]:
        """Run an operation after all earlier ones.

        Args:
            operation: if it fails, this call raises its exception, or else the future and all later
                calls do.
            result: the future's value when the operation is done.
            blocks: return only when the operation is done.
        """
        global _begun
        _begun += 1
        with self._lock:
            earlier = self._late[-1][1] if self._late else None
            if earlier is not None and not blocks:
                return self._run_later(operation, result)
        if earlier is not None:
            earlier.wait()
        if self._failed is not None:
            raise self._failed
        for waited in operation:
            if waited > _PATIENCE_S and not blocks:
                with self._lock:
                    return self._run_later(operation, result)
        done: torch.futures.Future[Any] = torch.futures.Future()
        done.set_result(result)
        return done

    def _run_later(self, operation: Operation, result: Any) -> torch.futures.Future[Any]:
        ended: torch.futures.Future[Any] = torch.futures.Future()
        self._late.append((operation, ended, result))
        if len(self._late) == 1:
            # A daemon thread: a rank that fails must not wait for others.
            threading.Thread(target=self._run_late, name="gradients", daemon=True).start()
        # Raise in `then`: only this way do waiters in C++ get the exception.
        return ended.then(_raise_or_return)

    def _run_late(self) -> None:
        while True:
            operation, ended, result = self._late[0]
            try:
                for _ in operation:
                    pass
            except Exception as error:
                self._failed = result = error
            with self._lock:
                self._late.popleft()
                is_last = not self._late
            ended.set_result(result)
            if is_last:
                return


def _raise_or_return(ended: torch.futures.Future[Any]) -> Any:
    result = ended.value()
    if isinstance(result, Exception):
        raise result
    return result
