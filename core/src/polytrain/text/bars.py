"""Thins out progress bars in a stream of text: only the last of many states counts. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_LONGEST = 10_000
"""Maximum characters of a state that is held back."""

_MOST_ROWS = 50

_MOTION = re.compile(r"\r|\x08+|\x1b\[(\?25[hl]|\d*[ABEFGJK])")
"""What moves a terminal's cursor back, or clears: bars of tqdm, Keras and rich are made of it."""

_SEQUENCE = re.compile(r"\x1b\[(?:\?25[hl]|\d*[ABEFGJK])")
"""Those among them that are control sequences. Text without any is searched fast."""

_BEGUN = re.compile(r"\x1b(?:\[[?\d]*)?\Z")
"""A control sequence whose end is still to come."""


@dataclass(slots=True)
class _Row:
    """A row of the terminal, from the place on where text is held back."""

    text: str = ""
    is_replaced: bool = False
    """Whether the text replaces what was in the row."""

    is_known: bool = True
    """Whether the row has been written since text is held back."""


class BarStates:
    """Thins out a process's output while a bar moves. All other text passes unchanged.

    It knows as much of a terminal as bars need, also several of them, one below the other: rows
    that the cursor returns to are held back until it has left them for good.
    """

    def __init__(self) -> None:
        self._rows: list[_Row] = []
        """The rows that are held back; none while there is no bar."""

        self._at = 0
        """The cursor's row among them."""

        self._top: int | None = None
        """The highest row that the cursor has gone up to in the latest text."""

        self._begins_row = self._has_returned = False
        """Whether the next text replaces the row, and whether a carriage return is the reason."""

        self._is_drawing = False
        """Whether the cursor is hidden: its rows are drawn again, by rich and others."""

        self._begun = ""
        self._taken = ""

    @property
    def moves(self) -> bool:
        """Whether the text so far ends with a bar's state, which the next state replaces."""
        return bool(self._rows)

    @property
    def rows(self) -> tuple[str, ...]:
        """The rows of the bars as they are now, from the top; none if there is no bar."""
        return tuple(row.text for row in self._rows if row.text.strip())

    @property
    def are_left(self) -> bool:
        """Whether the cursor is in an empty row below all others: the bars have probably ended."""
        if self._is_drawing or len(self._rows) < 2 or self._at < len(self._rows) - 1:
            return False
        return not self._has_returned and not self._rows[self._at].text.strip()

    @property
    def held(self) -> str:
        """The last state, which is held back until the next one."""
        return "\n".join(_passed(row) for row in self._rows[: self._at + 1] if row.is_known)

    def passed(self, text: str) -> str:
        """Return the text to pass on: whole lines with their last states, and text without bars.

        Args:
            text: the new text, which may end anywhere.
        """
        text, self._begun = self._begun + text, ""
        if "\x1b" in text[-8:] and (begun := _BEGUN.search(text)):
            text, self._begun = text[: begun.start()], begun.group()
        if not self._rows:
            first = _first_motion(text)
            if first < 0:
                return text
            begin = text.rfind("\n", 0, first) + 1
            before, text = text[:begin], text[begin:]
            self._rows, self._at, self._begins_row = [_Row()], 0, False
        else:
            before = ""
        self._top = None
        for number, line in enumerate(text.split("\n")):
            if number:
                self._go_down()
            self._write_line(line)
        return before + "".join(self._left_rows())

    def take_held(self) -> str:
        """Release and return the last state.

        Several bars, one below the other, stay as they are, because each is written when it moves:
        only the state of the first is returned, and once.
        """
        if self._is_drawing:
            return ""
        self._top = None
        left = "".join(self._left_rows())
        if len(self._rows) < 2:
            return left + self.take_all()
        first = self._rows[self._at]
        if first.text == self._taken:
            return left
        self._taken, first.is_replaced = first.text, True
        return left + _passed(first)

    def take_all(self) -> str:
        """Release and return all that is held back."""
        held, self._rows = self.held + self._begun, []
        self._has_returned, self._begun = False, ""
        return held

    def _left_rows(self) -> Iterator[str]:
        """Yield the rows that the cursor has left for good, and a row that isn't a bar's."""
        if not self._rows:
            return
        if self._top is not None:
            count = min(self._at, self._top)
        else:
            count = 0 if self._is_drawing else self._at
        count = max(count, len(self._rows) - _MOST_ROWS)
        yield from (f"{_passed(row)}\n" for row in self._rows[:count] if row.is_known)
        del self._rows[:count]
        self._at = max(0, self._at - count)
        row = self._rows[self._at]
        is_bar = self._is_drawing or self._has_returned or row.is_replaced or len(self._rows) > 1
        if not is_bar or len(row.text) > _LONGEST:
            yield _passed(row)
            self._rows = []

    def _write_line(self, line: str) -> None:
        """Write what comes before the next line feed."""
        if "\x08" not in line and "\x1b[" not in line:
            # The many states that a fast bar has between two reads.
            body = line.rstrip("\r")
            _, returned, state = body.rpartition("\r")
            if returned:
                self._return()
            self._write(state)
            if len(body) < len(line):
                self._return()
            return
        end = 0
        for motion in _MOTION.finditer(line):
            self._write(line[end : motion.start()])
            self._move(motion)
            end = motion.end()
        self._write(line[end:])

    def _write(self, text: str) -> None:
        if not text:
            return
        row = self._rows[self._at]
        row.is_known = True
        if self._begins_row:
            row.is_replaced = row.is_replaced or self._has_returned or bool(row.text)
            row.text = ""
        row.text += text
        self._begins_row = self._has_returned = False

    def _move(self, motion: re.Match[str]) -> None:
        sequence = motion.group(1)
        if motion.group() == "\r":
            self._return()
        elif sequence is None:
            self._clear(self._rows[self._at].text[: -len(motion.group())])
        elif sequence[0] == "?":
            self._is_drawing = sequence[-1] == "l"
            # Nothing is drawn again: what has been drawn stays.
            self._top = None
        else:
            kind, count = sequence[-1], int(sequence[:-1] or (0 if sequence[-1] in "JK" else 1))
            self._carry_out(kind, count)

    def _carry_out(self, kind: str, count: int) -> None:
        match kind:
            case "A" | "F":
                self._go_up(min(count, _MOST_ROWS))
            case "B" | "E":
                for _ in range(min(count, _MOST_ROWS)):
                    self._go_down()
            case "K" if count or self._begins_row:
                self._clear("")
            case "J":
                del self._rows[self._at + 1 :]
        if kind in "EFG":
            self._return()

    def _clear(self, rest: str) -> None:
        row = self._rows[self._at]
        row.text, row.is_replaced = rest, True

    def _return(self) -> None:
        self._begins_row = self._has_returned = True

    def _go_down(self) -> None:
        self._at += 1
        if self._at == len(self._rows):
            self._rows.append(_Row())
        self._begins_row, self._has_returned = True, False

    def _go_up(self, count: int) -> None:
        missing = max(0, count - self._at)
        self._rows[:0] = [_Row(is_known=False) for _ in range(missing)]
        self._at += missing - count
        self._top = self._at if self._top is None else min(self._top, self._at)
        self._begins_row = True


def _first_motion(text: str) -> int:
    """Return where the first of `_MOTION` begins in a text; -1 if there is none."""
    sequence = _SEQUENCE.search(text)
    places = (text.find("\r"), text.find("\x08"), -1 if sequence is None else sequence.start())
    return min((place for place in places if place >= 0), default=-1)


def _passed(row: _Row) -> str:
    return f"\r{row.text}" if row.is_replaced else row.text
