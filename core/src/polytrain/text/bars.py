"""Progress bars in a stream of text: of their many states the last one counts. Pure."""

from __future__ import annotations

import re

_LONGEST = 10_000
"""Characters of a state that is held back."""

_LOWER_BAR = re.compile(r"\n[^\n]*?\x1b\[A")
"""What tqdm writes for a bar below another: to the next line, its state, and up again."""


class BarStates:
    """Thins out what a process writes while a bar moves. All other text passes as it is."""

    def __init__(self) -> None:
        self._held = ""
        self.moves = False
        """Whether the text so far ends with the state of a bar: the next one replaces it."""

    def passed(self, text: str) -> str:
        """Return what is passed on: whole lines, each with its last state, and text without a bar.

        Args:
            text: what was written. It may end anywhere.
        """
        text = self._held + text
        self._held, self.moves = "", False
        if "\r" not in text:
            return text
        *lines, rest = _without_lower_bars(text).split("\n")
        done = "".join(f"{_last_state(line)}\n" for line in lines)
        if lines and "\r" not in rest:
            return done + rest
        self.moves, rest = True, _last_state(rest)
        if len(rest) > _LONGEST:
            return done + rest
        self._held = rest
        return done

    @property
    def held(self) -> str:
        """The last state, which waits for the next one."""
        return self._held

    def take_held(self) -> str:
        """Return the last state, and hold it no longer."""
        held, self._held = self._held, ""
        return held


def _without_lower_bars(text: str) -> str:
    count = 1
    while count and "\x1b[A" in text:
        text, count = _LOWER_BAR.subn("", text)
    return text


def _last_state(line: str) -> str:
    """Return a line without what a carriage return overwrites."""
    body = line.rstrip("\r")
    _, returned, state = body.rpartition("\r")
    return returned + state + line[len(body) : len(body) + 1]
