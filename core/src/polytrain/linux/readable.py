"""Waits for a descriptor of any number.

`select.select` refuses descriptors above 1023, which a driver with many open files has.
"""

import select
from typing import Protocol


class _HasDescriptor(Protocol):
    def fileno(self) -> int: ...


def is_readable(source: int | _HasDescriptor, timeout_s: float | None = 0) -> bool:
    """Return whether a descriptor can be read, or has reached its end.

    Args:
        source: the descriptor, or an object that has one.
        timeout_s: maximum seconds to wait; None for no limit.
    """
    waiting = select.poll()
    waiting.register(source, select.POLLIN)
    return bool(waiting.poll(None if timeout_s is None else timeout_s * 1000))
