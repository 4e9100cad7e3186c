"""Lines of text: cut out of a stream, and fitted into a terminal's columns. Pure."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

_WIDE = ("F", "W")


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A part of a line that is dropped or cut as a whole."""

    text: str
    weight: int
    """Parts with the least weight are dropped first if there isn't enough room."""

    least: int | None = None
    """Minimum columns when the part is cut, before any is dropped; None if it can't be cut."""


def printable(text: str) -> str:
    """Return text that can't move a terminal's cursor, or change later text.

    Control characters, and those that change the direction of text, become escapes.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(_escaped(each) if _is_control(each) else each for each in text)


def columns(text: str) -> int:
    """Return the number of terminal columns that printable text takes."""
    if text.isascii():
        return len(text)
    return sum(map(_columns, text))


def cut(text: str, width: int, *, mark: str = "…") -> str:
    """Return printable text cut to `width` columns, with `mark` at its end if it was cut."""
    if columns(text) <= width:
        return text
    room = width - columns(mark)
    if room < 0:
        return ""
    end = taken = 0
    for each in text:
        taken += _columns(each)
        if taken > room:
            break
        end += 1
    return f"{text[:end]}{mark}"


def padded(text: str, width: int, *, to_the_right: bool = False) -> str:
    """Return printable text with blanks behind it, or before it, up to `width` columns."""
    blanks = " " * (width - columns(text))
    return f"{blanks}{text}" if to_the_right else f"{text}{blanks}"


def fitted(parts: Sequence[Segment], width: int, *, separator: str = " · ", mark: str = "…") -> str:
    """Join the parts that there is room for.

    Args:
        parts: the parts, from left to right; parts without text are ignored.
        separator: text between two parts.
        mark: end of the last remaining part, if that alone is too long.
    """
    shown = [part for part in parts if part.text]
    while shown:
        line = separator.join(part.text for part in shown)
        excess = columns(line) - width
        if excess <= 0 or len(shown) == 1:
            return cut(line, width, mark=mark)
        for place, part in enumerate(shown):
            if text := _cut_by(excess, part, mark):
                texts = [each.text for each in shown]
                return separator.join([*texts[:place], text, *texts[place + 1 :]])
        # Of equal weights, drop the last part first.
        shown.remove(min(reversed(shown), key=lambda part: part.weight))
    return ""


def _cut_by(excess: int, part: Segment, mark: str) -> str:
    """Return a part's text shortened by `excess` columns; empty if it can't be."""
    room = columns(part.text) - excess
    return "" if part.least is None or room < part.least else cut(part.text, room, mark=mark)


def _columns(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in _WIDE else 1


def _is_control(character: str) -> bool:
    # Of the format characters (Cf), only joiners are harmless, and they aren't needed.
    return unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


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
