"""Thins out progress bars in a stream of text: only the last of many states counts. Pure."""

from __future__ import annotations

import re

_LONGEST = 10_000
"""Maximum characters of a state that is held back."""

_LOWER_BAR = re.compile(r"\n[^\n]*?\x1b\[A")
"""tqdm's output for a bar below another: a line down, the bar's state, and up again."""


class BarStates:
    """Thins out a process's output while a bar moves. All other text passes unchanged."""

    def __init__(self) -> None:
        self._held = ""
        self.moves = False
        """Whether the text so far ends with a bar's state, which the next state replaces."""

    def passed(self, text: str) -> str:
        """Return the text to pass on: whole lines with their last states, and text without bars.

        Args:
            text: the new text, which may end anywhere.
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
        """The last state, which is held back until the next one."""
        return self._held

    def take_held(self) -> str:
        """Release and return the last state."""
        held, self._held = self._held, ""
        return held


def _without_lower_bars(text: str) -> str:
    count = 1
    while count and "\x1b[A" in text:
        text, count = _LOWER_BAR.subn("", text)
    return text


def _last_state(line: str) -> str:
    """Return a line without the text that a carriage return overwrites."""
    body = line.rstrip("\r")
    _, returned, state = body.rpartition("\r")
    return returned + state + line[len(body) : len(body) + 1]
