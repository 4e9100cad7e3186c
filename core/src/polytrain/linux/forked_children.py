"""What forked children of this process must not hold: its user may fork at any time.

A connection ends, and a lock is released, only when the last process that has its descriptor closes
it. So a child that outlives its parent would keep both. What a child executes has neither: all
descriptors are closed then.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol, TypeVar


class _Closable(Protocol):
    def close(self) -> None:
        """Close what it has open in this process, without an effect on other processes."""


_T = TypeVar("_T", bound=_Closable)

_kept_from: weakref.WeakSet[_Closable] = weakref.WeakSet()


def keep_from_children(owner: _T) -> _T:
    """Have an object closed in all forked children of this process, for as long as it exists."""
    _kept_from.add(owner)
    return owner


class OwnDescriptor:
    """A descriptor that forked children of this process don't have."""

    def __init__(self, number: int) -> None:
        self._number: int | None = number
        keep_from_children(self)

    def fileno(self) -> int:
        """Return its number; -1 if it is closed."""
        return -1 if self._number is None else self._number

    def detach(self) -> int:
        """Leave it open, to whoever closes it from now on."""
        number, self._number = self.fileno(), None
        return number

    def close(self) -> None:
        """Close it, unless it is closed."""
        # Forgotten first: in a child that is forked meanwhile the number may be another file's.
        number = self.detach()
        if number != -1:
            os.close(number)


def _close_all() -> None:
    for owner in list(_kept_from):
        owner.close()


os.register_at_fork(after_in_child=_close_all)
