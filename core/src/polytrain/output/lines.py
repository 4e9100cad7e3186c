"""Text that arrives in pieces, as the lines that a terminal would show. Pure."""

from __future__ import annotations

LONGEST = 100_000
"""Characters after which a line is passed on though it has no end."""


class LineBuffer:
    """Cuts a stream of text into lines. Of what a bar of progress writes the last state is kept."""

    def __init__(self) -> None:
        self._rest = ""

    def feed(self, text: str) -> list[str]:
        """Add what was written; return the lines that are complete now."""
        *lines, rest = (self._rest + text).split("\n")
        shown = [_last_state(line) for line in lines]
        # A return that comes last may yet be half of a line's end.
        self._rest = _last_state(rest) + ("\r" if rest.endswith("\r") else "")
        while len(self._rest) > LONGEST:
            shown.append(self._rest[:LONGEST])
            self._rest = self._rest[LONGEST:]
        return shown

    def take_rest(self) -> str:
        """The line that has no end, because its writer is gone; empty if there is none."""
        rest, self._rest = _last_state(self._rest), ""
        return rest


def _last_state(line: str) -> str:
    """What stays of a line in which a carriage return goes back to the beginning."""
    return line.rstrip("\r").rpartition("\r")[2]
