"""Handles of operations that run in the background."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from polytrain_torch.horovod.call_log import completed


@dataclass(frozen=True, kw_only=True)
class Pending:
    """An operation that runs in the background."""

    works: Sequence[Any]
    """torch's work objects, to wait for in order."""

    finish: Callable[[], Any]
    """Returns the result after all works are done."""

    number: int = 0
    """Number of the logged call that it completes; 0 for none."""

    def is_done(self) -> bool:
        """Whether `wait` would return without blocking."""
        return all(work.is_completed() for work in self.works)

    def wait(self) -> Any:
        """Wait for the operation, and return its result."""
        for work in self.works:
            work.wait()
        completed(self.number)
        return self.finish()


_numbers = count()
_pending: dict[int, Pending] = {}


def handle_of(pending: Pending) -> int:
    """Return a new handle of an operation, for `poll` and `synchronize`."""
    handle = next(_numbers)
    _pending[handle] = pending
    return handle


def poll(handle: int) -> bool:
    """Whether the operation is done, so that `synchronize` won't block."""
    return handle not in _pending or _pending[handle].is_done()


def synchronize(handle: int) -> Any:
    """Wait for an operation and return its result; None if a call has returned it before."""
    pending = _pending.pop(handle, None)
    return None if pending is None else pending.wait()
