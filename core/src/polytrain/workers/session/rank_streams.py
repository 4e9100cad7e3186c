"""Python's standard streams in a worker process whose output has one pipe."""

from __future__ import annotations

import io
import sys
from typing import Any

from polytrain.events.output import ERROR_BEGINS, ERROR_ENDS, OutputRoute

_BEGIN, _END = ERROR_BEGINS.encode(), ERROR_ENDS.encode()


def open_streams(route: OutputRoute) -> None:
    """Make this process's `sys.stdout` and `sys.stderr` those of a route.

    Args:
        route: how its output gets to the user.
    """
    if not route.one_pipe:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    sys.stderr = marked_errors(2)


def marked_errors(descriptor: int) -> io.TextIOWrapper:
    """Return a stream that marks what it writes to a descriptor as standard error."""
    raw = _MarkedErrors(descriptor, "w", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding="utf-8", errors="backslashreplace", line_buffering=True
    )


class _MarkedErrors(io.FileIO):
    """Marks what it writes, in the same call of the system: nothing comes in between."""

    def write(self, data: Any, /) -> int:
        """Write all data."""
        left = b"".join((_BEGIN, data, _END))
        while left:
            left = left[super().write(left) or 0 :]
        return len(data)
