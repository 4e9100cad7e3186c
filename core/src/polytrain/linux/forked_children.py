"""Closes connections and locks in forked children of this process: users may fork at any time.

A connection ends, and a lock is released, only when the last process with its descriptor closes it.
So a child that outlives its parent would keep both. An exec closes all these descriptors.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol, TypeVar


class _Closable(Protocol):
    def close(self) -> None:
        """Close it in this process, without an effect on other processes."""


_T = TypeVar("_T", bound=_Closable)

_kept_from: weakref.WeakSet[_Closable] = weakref.WeakSet()


def keep_from_children(owner: _T) -> _T:
    """Close an object in all forked children of this process, as long as the object exists."""
    _kept_from.add(owner)
    return owner


class OwnDescriptor:
    """A descriptor that forked children of this process don't have."""

    def __init__(self, number: int) -> None:
        self._number: int | None = number
        keep_from_children(self)

    def fileno(self) -> int:
        """Return the descriptor's number; -1 if it is closed."""
        return -1 if self._number is None else self._number

    def detach(self) -> int:
        """Return the open descriptor's number, and give up its ownership."""
        number, self._number = self.fileno(), None
        return number

    def close(self) -> None:
        """Close the descriptor, unless it is closed."""
        # Forget it first: in a child that is forked meanwhile, the number may be reused.
        number = self.detach()
        if number != -1:
            os.close(number)


def _close_all() -> None:
    for owner in list(_kept_from):
        owner.close()


os.register_at_fork(after_in_child=_close_all)
