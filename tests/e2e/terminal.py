"""A terminal in memory: a program runs in it, and a test sees its screen."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import struct
import sys
import termios
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pyte

from polytrain.linux.processes import is_readable

_PATIENCE_S = 120.0


class Terminal:
    """A pseudo-terminal with a screen. What scrolls off its top is kept."""

    def __init__(self, descriptor: int, pid: int, *, columns: int, rows: int) -> None:
        self._descriptor = descriptor
        self._pid = pid
        self._screen = pyte.HistoryScreen(columns, rows, history=10_000, ratio=1)
        self._stream = pyte.ByteStream(self._screen)
        self.resize(columns, rows)

    @property
    def rows(self) -> list[str]:
        """What is on the screen, from the top."""
        return [row.rstrip() for row in self._screen.display]

    @property
    def text(self) -> str:
        """All that has been printed: what has scrolled away, and the screen."""
        width = self._screen.columns
        gone = ["".join(row[at].data for at in range(width)) for row in self._screen.history.top]
        return "\n".join(row.rstrip() for row in [*gone, *self.rows])

    @property
    def scrolls_whole(self) -> bool:
        """Whether no row is kept from scrolling."""
        margins = self._screen.margins
        return margins is None or (margins.top, margins.bottom) == (0, self._screen.lines - 1)

    @property
    def cursor_row(self) -> int:
        """The row that the next character goes to, from 0."""
        return int(self._screen.cursor.y)

    def resize(self, columns: int, rows: int) -> None:
        """Change the size, as a window's frame does. What was written before is shown first."""
        while is_readable(self._descriptor) and self._show_some(time.monotonic()):
            pass
        self._screen.resize(rows, columns)
        size = struct.pack("HHHH", rows, columns, 0, 0)
        fcntl.ioctl(self._descriptor, termios.TIOCSWINSZ, size)

    def type(self, keys: bytes) -> None:
        """Press keys: Ctrl-C is b"\\x03"."""
        os.write(self._descriptor, keys)

    def show_until(self, is_there: Callable[[], bool]) -> None:
        """Show what is printed until something is on the screen."""
        deadline = time.monotonic() + _PATIENCE_S
        while not is_there():
            assert self._show_some(deadline), f"the program has ended:\n{self.text}"
            assert time.monotonic() < deadline, f"it isn't there:\n{self.text}"

    def show_all(self) -> int:
        """Show what is printed until the program ends; return its exit code."""
        deadline = time.monotonic() + _PATIENCE_S
        while self._show_some(deadline):
            assert time.monotonic() < deadline, f"it doesn't end:\n{self.text}"
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])

    def _show_some(self, deadline: float) -> bool:
        left_s = max(0.0, deadline - time.monotonic())
        if not is_readable(self._descriptor, left_s):
            return True
        try:
            data = os.read(self._descriptor, 1 << 16)
        except OSError:  # nobody has the other end any more
            return False
        self._stream.feed(data)
        return bool(data)


@contextmanager
def terminal(
    *command: str,
    directory: Path,
    environment: Mapping[str, str] | None = None,
    columns: int = 80,
    rows: int = 24,
) -> Iterator[Terminal]:
    """Run a command in a terminal."""
    variables = {**os.environ, "TERM": "xterm-256color", **(environment or {})}
    pid, descriptor = pty.fork()
    if pid == 0:
        try:
            os.chdir(directory)
            os.execvpe(command[0], command, variables)
        finally:
            os._exit(127)
    try:
        yield Terminal(descriptor, pid, columns=columns, rows=rows)
    finally:
        try:
            if os.waitpid(pid, os.WNOHANG)[0] == 0:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        except ChildProcessError:
            pass
        os.close(descriptor)


PYTHON = sys.executable
