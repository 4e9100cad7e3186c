"""Turns text that arrives in pieces into the lines that a terminal would show. Pure."""

from __future__ import annotations

LONGEST = 100_000
"""Characters after which a line is passed on although it hasn't ended."""


class LineBuffer:
    """Cuts a stream of text into lines. Of a progress bar's states only the last is kept."""

    def __init__(self) -> None:
        self._rest = ""

    def feed(self, text: str) -> list[str]:
        """Add text; return the lines that are complete now."""
        *lines, rest = (self._rest + text).split("\n")
        shown = [_last_state(line) for line in lines]
        # A final carriage return may be the first half of a line end.
        self._rest = _last_state(rest) + ("\r" if rest.endswith("\r") else "")
        while len(self._rest) > LONGEST:
            shown.append(self._rest[:LONGEST])
            self._rest = self._rest[LONGEST:]
        return shown

    def take_rest(self) -> str:
        """Remove and return the unfinished line, because its writer is gone; empty if none."""
        rest, self._rest = _last_state(self._rest), ""
        return rest


def _last_state(line: str) -> str:
    """Return the text after a line's last carriage return, which a terminal would show."""
    return line.rstrip("\r").rpartition("\r")[2]
