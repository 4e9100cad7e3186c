"""Collective operations on picklable objects, and calls outside the collective."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from xgboost import collective


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The ranks that train together, by default one. All ranks must call the same methods."""

    me: int = 0
    size: int = 1

    def gathered(self, piece: Any) -> list[Any]:
        """Return every rank's piece, by rank."""
        return [self._broadcast_from(piece, root) for root in range(self.size)]

    def broadcast(self, piece: Any) -> Any:
        """Return rank 0's piece on every rank."""
        return self._broadcast_from(piece, 0)

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank."""
        if self.size == 1:
            return flag
        return bool(collective.allreduce(np.array([flag], np.int32), collective.Op.MAX)[0])

    def _broadcast_from(self, piece: Any, root: int) -> Any:
        if self.size == 1:
            return piece
        # Wrapped in a list, since XGBoost can't broadcast None.
        return collective.broadcast([piece] if root == self.me else None, root)[0]


class Outside(Protocol):
    """Makes a call outside the collective, and waits for it."""

    def __call__(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Return the call's result, or raise its error."""


@contextmanager
def outside_the_collective() -> Iterator[Outside]:
    """Yield a function that makes calls on another thread: communicators are per thread."""
    with ThreadPoolExecutor(1, thread_name_prefix="outside-the-collective") as thread:
        yield lambda call, *args, **kwargs: thread.submit(call, *args, **kwargs).result()
