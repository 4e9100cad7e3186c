"""Operations of a rank that wait for other ranks, one after another, in the order of their calls.

An operation runs in the call, which is fastest. If other ranks are late, it goes on in a thread,
and the call returns, as in other process groups: a rank that is late may need this one first.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

_PATIENCE_S = 0.05
"""Seconds for which a call waits for other ranks."""

Operation = Iterator[float]
"""Runs when it is iterated over, and gives the seconds of its present wait now and then."""


class OperationQueue:
    """The operations of one process group on this rank."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._late: deque[tuple[Operation, torch.futures.Future[Any], Any]] = deque()
        """What the thread runs; it ends when there is nothing."""

        self._failed: Exception | None = None

    def run(self, operation: Operation, result: Any, *, blocks: bool) -> torch.futures.Future[Any]:
        """Run an operation after all earlier ones.

        Args:
            operation: an exception that it raises is raised by this call, or by the future and all
                later calls.
            result: what the future has when it is done.
            blocks: whether the call returns only when it is done.
        """
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
            # A daemon: a rank that fails doesn't wait for others.
            threading.Thread(target=self._run_late, name="gradients", daemon=True).start()
        # Only so does what waits in C++ get an exception.
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
