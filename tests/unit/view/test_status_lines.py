"""Lines at the bottom of a terminal: all else scrolls above them, and at the end they are gone."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import termios
from collections.abc import Iterator

import pyte
import pytest

from polytrain.output.echo import takes_sequences
from polytrain.view.progress.status_lines import StatusLines


class Screen:
    """A terminal of which a test has both ends."""

    def __init__(self, columns: int = 40, rows: int = 10) -> None:
        self._ours, theirs = pty.openpty()
        self.stream = os.fdopen(theirs, "w", buffering=1)
        self._screen = pyte.Screen(columns, rows)
        self._parser = pyte.ByteStream(self._screen)
        self.resize(columns, rows)
        os.set_blocking(self._ours, False)

    def resize(self, columns: int, rows: int) -> None:
        self._screen.resize(rows, columns)
        size = struct.pack("HHHH", rows, columns, 0, 0)
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, size)

    @property
    def rows(self) -> list[str]:
        self._show()
        return [row.rstrip() for row in self._screen.display]

    @property
    def printed(self) -> list[str]:
        """All rows with text."""
        return [row for row in self.rows if row]

    @property
    def scrolls_whole(self) -> bool:
        self._show()
        margins = self._screen.margins
        return margins is None or (margins.top, margins.bottom) == (0, self._screen.lines - 1)

    @property
    def changed_rows(self) -> set[int]:
        """The rows that something was written to."""
        self._show()
        return set(self._screen.dirty)

    def forget_changes(self) -> None:
        self._screen.dirty.clear()

    def close(self) -> None:
        self.stream.close()
        os.close(self._ours)

    def _show(self) -> None:
        try:
            while data := os.read(self._ours, 1 << 16):
                self._parser.feed(data)
        except BlockingIOError:
            pass


@pytest.fixture
def screen() -> Iterator[Screen]:
    made = Screen()
    yield made
    made.close()


def lines(size: os.terminal_size) -> list[str]:
    return ["first line".ljust(60, ".")[: size.columns], "second line"]


def test_what_is_printed_scrolls_above_the_lines(screen: Screen) -> None:
    with StatusLines(screen.stream, lines):
        for number in range(30):
            print(f"line {number}", file=screen.stream)
        assert screen.rows == [
            *(f"line {number}" for number in range(23, 30)),
            "",
            "first line............................."[:39],
            "second line",
        ]
    assert screen.printed == [f"line {number}" for number in range(23, 30)]
    assert screen.scrolls_whole


@pytest.mark.parametrize("before", [0, 3, 9, 20])
def test_what_was_there_stays_there(screen: Screen, before: int) -> None:
    """Also at the bottom of the screen, where room has to be made."""
    for number in range(before):
        print(f"line {number}", file=screen.stream)
    kept = [f"line {number}" for number in range(before)][-7:]
    with StatusLines(screen.stream, lines) as status:
        print("later", file=screen.stream)
        status.draw()
        assert screen.printed[:-2][-len(kept) - 1 :] == [*kept, "later"][-7:]
    print("after", file=screen.stream)
    assert screen.printed[-2:] == ["later", "after"]


def test_a_line_that_somebody_writes_in_parts_is_whole(screen: Screen) -> None:
    for _ in range(20):
        print("above", file=screen.stream)
    print("one, ", end="", file=screen.stream, flush=True)
    number = 0

    def changing(size: os.terminal_size) -> list[str]:
        return [f"step {number}", "ranks"]

    with StatusLines(screen.stream, changing) as status:
        print("two, ", end="", file=screen.stream, flush=True)
        number = 1
        status.draw()
        print("three, ", end="", file=screen.stream, flush=True)
        assert "one, two, three," in screen.printed
        screen.resize(60, 14)
        status.draw()
        print("four", file=screen.stream)
        assert "one, two, three, four" in screen.printed
    assert not any("step" in row for row in screen.rows)


@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (20, 8), (20, 24), (80, 8)])
def test_another_size_has_the_lines_once(screen: Screen, columns: int, rows: int) -> None:
    with StatusLines(screen.stream, lines) as status:
        for number in range(5):
            print(f"line {number}", file=screen.stream)
        assert screen.rows[-1] == "second line"
        screen.resize(columns, rows)
        status.draw()
        assert screen.rows[-1] == "second line"
        assert screen.rows[-2].startswith("first line")
        assert sum("line.." in row for row in screen.rows) == 1
        assert sum("second" in row for row in screen.rows) == 1


def test_a_terminal_of_a_few_rows_is_left_alone(screen: Screen) -> None:
    with StatusLines(screen.stream, lines) as status:
        screen.resize(40, 5)
        status.draw()
        print("printed", file=screen.stream)
        assert not any("second" in row for row in screen.rows)
        assert screen.scrolls_whole
        screen.resize(40, 10)
        status.draw()
        assert screen.rows[-1] == "second line"


def test_what_another_program_has_reset_is_set_again(screen: Screen) -> None:
    shown = ["one", "one"]
    with StatusLines(screen.stream, lambda size: list(shown)) as status:
        print("\x1bc", end="", file=screen.stream, flush=True)  # as `reset` does
        assert screen.scrolls_whole
        shown[0] = "two"
        status.draw()
        assert screen.rows[-2:] == ["two", "one"]
        assert not screen.scrolls_whole


def test_nothing_is_written_while_nothing_changes(screen: Screen) -> None:
    with StatusLines(screen.stream, lines) as status:
        assert screen.rows[-1] == "second line"
        screen.forget_changes()
        status.draw()
        assert not screen.changed_rows


def test_a_terminal_that_is_gone_ends_nothing() -> None:
    ours, theirs = pty.openpty()
    with open(theirs, "w") as stream, StatusLines(stream, lines) as status:
        os.close(ours)
        status.draw()
        status.draw()


def test_a_file_is_no_terminal(screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    assert takes_sequences(screen.stream)
    with open(os.devnull, "w") as file:
        assert not takes_sequences(file)
    assert not takes_sequences(None)


def test_lines_come_and_go_without_a_trace(screen: Screen) -> None:
    shown, now = ["first", "second"], 0.0
    with StatusLines(screen.stream, lambda size: list(shown), now=lambda: now) as status:
        print(*(f"line {number}" for number in range(20)), sep="\n", file=screen.stream)
        shown.insert(0, "a bar")
        status.draw()
        assert screen.rows[-3:] == ["a bar", "first", "second"]
        assert "line 19" in screen.rows
        # A bar that ends makes room for the next one, for a moment.
        shown.pop(0)
        status.draw()
        assert screen.rows[-3:] == ["", "first", "second"]
        now = 5.0
        status.draw()
        assert screen.rows[-2:] == ["first", "second"]
        print("the last line", file=screen.stream)
        assert "a bar" not in screen.rows
        assert screen.rows.count("first") == 1
