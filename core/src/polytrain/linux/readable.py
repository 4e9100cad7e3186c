"""Waiting for a descriptor, whatever its number.

`select.select` refuses descriptors from 1024 on, and a driver that has many files open has those.
"""

import select
from typing import Protocol


class _HasDescriptor(Protocol):
    def fileno(self) -> int: ...


def is_readable(source: int | _HasDescriptor, timeout_s: float | None = 0) -> bool:
    """Return whether a descriptor can be read, or has reached its end.

    Args:
        source: the descriptor, or an object that has one.
        timeout_s: how long to wait for it; None waits without a limit.
    """
    waiting = select.poll()
    waiting.register(source, select.POLLIN)
    return bool(waiting.poll(None if timeout_s is None else timeout_s * 1000))
