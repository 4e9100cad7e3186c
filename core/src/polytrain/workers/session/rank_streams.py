"""Python's standard streams in a worker process, whose output others show."""

from __future__ import annotations

import io
import os
import sys
from typing import Any

from polytrain.events.output import ERROR_BEGINS, ERROR_ENDS, OutputRoute

_MARKS = ERROR_BEGINS.encode(), ERROR_ENDS.encode()


def open_streams(route: OutputRoute) -> None:
    """Make this process's `sys.stdout` and `sys.stderr` those of a route."""
    sys.stdout.flush()
    sys.stderr.flush()
    # What both streams share is a terminal if bars are shown there; else standard error alone is.
    if route.one_pipe and route.shows_bars:
        sys.stdout = _text(io.FileIO(1, "w", closefd=False), shows_bars=True)
    if route.one_pipe:
        sys.stderr = marked_errors(2, shows_bars=route.shows_bars)
    elif route.shows_bars:
        sys.stderr = _text(io.FileIO(2, "w", closefd=False), shows_bars=True)


def marked_errors(descriptor: int, *, shows_bars: bool = False) -> io.TextIOWrapper:
    """Return a stream that marks what it writes to a descriptor as standard error.

    Args:
        descriptor: the descriptor, which stays open.
        shows_bars: whether bars that are written to it are shown while they move.
    """
    return _text(_MarkedErrors(descriptor, "w", closefd=False), shows_bars=shows_bars)


class _MarkedErrors(io.FileIO):
    """Marks what it writes, in the same call of the system: nothing comes in between."""

    def write(self, data: Any, /) -> int:
        """Write all data."""
        left = b"".join((_MARKS[0], data, _MARKS[1]))
        while left:
            left = left[os.writev(self.fileno(), [left]) :]
        return len(data)


class _ShownText(io.TextIOWrapper):
    """Text of a stream that looks like a terminal to libraries whose bars move only there.

    To the system it is a pipe: programs in other languages, and terminal settings, take it for one.
    """

    def isatty(self) -> bool:
        """Return that the user sees it on a terminal."""
        return True


def _text(raw: io.FileIO, *, shows_bars: bool) -> io.TextIOWrapper:
    kind = _ShownText if shows_bars else io.TextIOWrapper
    return kind(
        io.BufferedWriter(raw), encoding="utf-8", errors="backslashreplace", line_buffering=True
    )
