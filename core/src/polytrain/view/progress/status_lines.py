"""Lines that stay at the bottom of a terminal, while everything else scrolls above them.

The terminal's own scrolling region does that: whoever writes to the terminal, through whatever
stream or process, writes above the lines. So no stream is replaced, and nothing is wrapped.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from typing import TextIO

from polytrain.output.line_layout import printable

_LEAST_ROWS = 6
"""In a lower terminal nothing is drawn: the lines would take too much of it."""

_ESC = "\x1b"
_SAVE, _RESTORE = f"{_ESC}7", f"{_ESC}8"
_ERASE_LINE, _ERASE_BELOW = f"{_ESC}[2K", f"{_ESC}[J"
_DOWN = f"{_ESC}D"
"""To the next row, which scrolls at the bottom, in the same column: somebody's line may go on."""

_SCROLL_ALL = f"{_ESC}[r"

_SHRINKS_AFTER_S = 2.0
"""Seconds after which the room of lines that are gone is given back: the next bar may need it."""

Lines = Callable[[os.terminal_size], Sequence[str]]
"""Returns the lines for a terminal of this size: none longer than its columns."""


class StatusLines:
    """Lines at the bottom of a terminal. At the end they are gone, and all of it scrolls again."""

    def __init__(
        self,
        stream: TextIO,
        lines: Lines,
        *,
        styled: Callable[[Sequence[str]], Sequence[str]] = list,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            stream: the terminal.
            lines: returns them; called at each drawing. Their number may change.
            styled: colours printable lines.
            now: reads a monotonic clock, in seconds.
        """
        self._descriptor = stream.fileno()
        self._lines = lines
        self._styled = styled
        self._now = now
        self._count = 0
        """How many lines there is room for."""

        self._needed_at = 0.0
        """When all of them were last needed."""

        self._size: os.terminal_size | None = None
        """The size for which there is room; None if there is none."""

        self._drawn: list[str] = []
        self._is_open = False

    def __enter__(self) -> StatusLines:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> None:
        """Draw the lines for the first time."""
        self._is_open = True
        self.draw()

    def close(self) -> None:
        """Take the lines away."""
        self._is_open = False
        if self._size is not None:
            with contextlib.suppress(OSError):  # the terminal is gone
                self._write(self._taken_away())

    def draw(self) -> None:
        """Draw the lines, if they have changed, or the terminal's size has.

        Nothing is drawn any more once the terminal is gone.
        """
        if self._is_open:
            try:
                self._draw()
            except OSError:
                self._is_open = False

    def _draw(self) -> None:
        size = os.get_terminal_size(self._descriptor)
        text, now = "", self._now()
        # The last column stays empty: some terminals would begin another line.
        room = os.terminal_size((size.columns - 1, size.lines))
        lines = [printable(line) for line in self._lines(room)]
        if len(lines) >= self._count:
            self._needed_at = now
        is_other = len(lines) > self._count or now - self._needed_at >= _SHRINKS_AFTER_S
        if size != self._size or (is_other and len(lines) != self._count):
            if self._size is not None:
                text += self._taken_away()
            if size.lines < _LEAST_ROWS:
                self._size = None
                self._write(text)
                return
            self._count, self._needed_at = len(lines), now
            text += self._made_room(size)
            self._size, self._drawn = size, []
        lines = [""] * (self._count - len(lines)) + lines
        if lines != self._drawn:
            self._drawn = lines
            text += self._placed(size, lines)
        self._write(text)

    def _made_room(self, size: os.terminal_size) -> str:
        """Move what is there up, if need be, and let the rows above the lines scroll."""
        # Setting the region moves the cursor to the top.
        region = f"{_SAVE}{_ESC}[1;{size.lines - self._count}r{_RESTORE}"
        return _DOWN * self._count + f"{_ESC}[{self._count}A{region}"

    def _placed(self, size: os.terminal_size, lines: Sequence[str]) -> str:
        # The region once more: another program may have reset it, such as an editor after Ctrl-Z.
        placed = f"{_SAVE}{_ESC}[1;{size.lines - self._count}r"
        for row, line in enumerate(self._styled(lines), start=size.lines - self._count + 1):
            placed += f"{_ESC}[{row};1H{_ERASE_LINE}{line}"
        return placed + _RESTORE

    def _taken_away(self) -> str:
        return f"{_SAVE}{_SCROLL_ALL}{_RESTORE}{_ERASE_BELOW}"

    def _write(self, text: str) -> None:
        """Write in one call: nothing of other writers comes in between."""
        data = text.encode(errors="replace")
        while data:
            data = data[os.write(self._descriptor, data) :]
