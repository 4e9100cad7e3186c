"""Reads the pipe of a worker process's standard output or error, or of both."""

from __future__ import annotations

import asyncio
import codecs
import fcntl
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import groupby
from operator import itemgetter

from polytrain.events.output import ERROR_BEGINS, ERROR_ENDS
from polytrain.text.bars import BarStates

READ_SIZE = 1 << 16

_READS = 64
"""Number of reads that empty a pipe, of 64 KiB to 1 MiB on Linux, unless it is refilled."""

_SHORTEST_BAR_PAUSE_S = 0.001
_BAR_PAUSE_S = 0.5
"""Seconds between reads while a progress bar moves slowly; else each state wakes the agent."""

_BAR_SHOWN_EVERY_S = 0.2
"""Seconds between states of a bar that is shown while it moves."""

_BAR_PASSES_EVERY_S = 10.0
"""Seconds between states of a moving progress bar that are passed on."""

LAST_WORDS = 4000
"""Characters to keep, to explain the worker process's end."""

BOTH = "both"
"""Name of a pipe for both streams."""


class OutputPipe:
    """Reads the pipe as text, and passes it on. All methods run on the agent's event loop.

    In a pipe for both streams everything is in the order in which it was written, by whatever
    language or process. Python's standard error is marked there (`ERROR_BEGINS`), so that a bar
    that moves and lines that are printed meanwhile don't get mixed up.
    """

    def __init__(
        self,
        reader: int,
        *,
        stream: str,
        on_text: Callable[[str, str], None],
        before_text: Callable[[], None] = lambda: None,
        on_bars: Callable[[tuple[str, ...]], None] | None = None,
    ) -> None:
        """
        Args:
            reader: the descriptor to read, which `close` closes.
            stream: "stdout", "stderr", or `BOTH`.
            on_text: called with the name of a stream, and its text.
            before_text: called before text is passed on that has just arrived.
            on_bars: called with the rows of bars whenever they have moved; None if nobody looks.
        """
        self._is_for_both = stream == BOTH
        self._stream = "stdout" if self._is_for_both else stream
        """The stream of the next character."""

        self._before_text = before_text
        self._on_bars = on_bars
        self._longest_pause_s = _BAR_PAUSE_S if on_bars is None else _BAR_SHOWN_EVERY_S
        self._bar_rows: dict[str, tuple[str, ...]] = {}
        """Of each stream its bars; they stay while they stand still."""

        self._shown_bars: tuple[str, ...] = ()
        self._showed_at = -math.inf
        self._reader = reader
        self._on_text = on_text
        self._loop = asyncio.get_running_loop()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._limit = OutputLimit(now=self._loop.time())
        self._bars: defaultdict[str, BarStates] = defaultdict(BarStates)
        self._passed_at = self._moved_at = self._loop.time()
        self._pause: asyncio.Handle | None = None
        self._pause_s = _SHORTEST_BAR_PAUSE_S
        # Small writes leave gaps in the pipe's pages, so half its size may already fill it.
        self._full = fcntl.fcntl(reader, fcntl.F_GETPIPE_SZ) // 2
        self._is_over = False
        """Whether all writers are gone."""

        self._said = ""

    @property
    def last_words(self) -> str:
        """The end of the text."""
        held = "".join(bars.held for bars in self._bars.values())
        return (self._said + held)[-LAST_WORDS:]

    def open(self) -> None:
        """Start reading."""
        os.set_blocking(self._reader, False)
        self._loop.add_reader(self._reader, self._look)

    def read_all(self) -> None:
        """Pass on the pipe's present content; other processes may still write to it."""
        for _ in range(_READS):
            if not self._read():
                break
        for stream, bars in self._bars.items():
            self._pass_on(stream, bars.take_all())

    def catch_up(self) -> None:
        """Pass on what has arrived while this pauses: it was written before what comes now."""
        if self._pause is not None:
            self._read()

    def close(self) -> None:
        """Pass on the pipe's content, and close it."""
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
        self.read_all()
        self._emit(self._stream, self._limit.notice())
        self._loop.remove_reader(self._reader)
        os.close(self._reader)

    def _look(self) -> None:
        """Read a limited amount: a process that never stops writing would block the event loop.

        While a progress bar moves, pause between reads.
        """
        is_paused, self._pause = self._pause is not None, None
        size = self._read()
        now = self._loop.time()
        moves, holds = (
            any(bars.moves for bars in self._bars.values()),
            any(bars.held for bars in self._bars.values()),
        )
        self._show_bars(now)
        if size and moves:
            if not is_paused:
                self._loop.remove_reader(self._reader)
                self._pause_s = _SHORTEST_BAR_PAUSE_S
            self._moved_at = now
            if now - self._passed_at >= _BAR_PASSES_EVERY_S:
                self._pass_held_on()
            self._look_later(is_full=size >= self._full)
        elif is_paused and self._is_over:
            self._pass_held_on()
        elif is_paused and holds and now - self._moved_at < _BAR_PAUSE_S:
            self._look_later(is_full=False)
        elif is_paused:
            # The bar stands still: its state may be the last sign before a hang.
            self._pass_held_on()
            self._show_bars(now)
            self._loop.add_reader(self._reader, self._look)

    def _look_later(self, *, is_full: bool) -> None:
        """Schedule the next read before a process that writes at this rate must wait."""
        if is_full:
            self._pause_s = _SHORTEST_BAR_PAUSE_S
            self._pause = self._loop.call_soon(self._look)
        else:
            self._pause = self._loop.call_later(self._pause_s, self._look)
            self._pause_s = min(2 * self._pause_s, self._longest_pause_s)

    def _show_bars(self, now: float) -> None:
        if self._on_bars is None:
            return
        rows = tuple(row for each in self._bar_rows.values() for row in each)
        is_due = now - self._showed_at >= _BAR_SHOWN_EVERY_S or not rows
        if is_due and rows != self._shown_bars:
            self._shown_bars, self._showed_at = rows, now
            self._on_bars(rows)

    def _read(self) -> int:
        """Read once; return the number of bytes, which is 0 if there are none now."""
        try:
            data = os.read(self._reader, READ_SIZE)
        except BlockingIOError:
            return 0
        if self._pause is None:
            self._before_text()
        for stream, text in self._by_stream(self._decoder.decode(data, final=not data)):
            for other, bars in self._bars.items():
                if other != stream and bars.are_left:
                    # It was written before this text.
                    self._pass_held_on_of(other, bars)
            self._pass_on(stream, self._bars[stream].passed(text))
            self._bar_rows[stream] = self._bars[stream].rows
        if not data:
            self._is_over = True
            self._loop.remove_reader(self._reader)
        return len(data)

    def _by_stream(self, text: str) -> Iterator[tuple[str, str]]:
        """Yield the parts of a text, each with its stream: consecutive ones differ."""
        if not self._is_for_both or (ERROR_BEGINS not in text and ERROR_ENDS not in text):
            yield self._stream, text
            return
        found: list[tuple[str, str]] = []
        for number, part in enumerate(text.split(ERROR_BEGINS)):
            error, rest = "", part
            if number or self._stream == "stderr":
                error, end, rest = part.partition(ERROR_ENDS)
                self._stream = "stdout" if end else "stderr"
            found += [("stderr", error), ("stdout", rest.replace(ERROR_ENDS, ""))]
        parts = (each for each in found if each[1])
        for stream, same in groupby(parts, key=itemgetter(0)):
            yield stream, "".join(text for _, text in same)

    def _pass_held_on(self) -> None:
        for stream, bars in self._bars.items():
            self._pass_held_on_of(stream, bars)

    def _pass_held_on_of(self, stream: str, bars: BarStates) -> None:
        if bars.are_left:
            self._bar_rows[stream] = ()
        self._pass_on(stream, bars.take_held())

    def _pass_on(self, stream: str, text: str) -> None:
        if text:
            self._passed_at = self._loop.time()
            self._said = (self._said + text)[-LAST_WORDS:]
        self._emit(stream, self._limit.passed(text, now=self._loop.time()))

    def _emit(self, stream: str, text: str) -> None:
        if text:
            self._on_text(stream, text)


PER_SECOND = 1 << 20
"""Sustained characters per second that a stream may write."""

BURST = 8 << 20
"""Characters that a stream may write in one burst."""


class OutputLimit:
    """A token bucket for one stream of a rank. Pure.

    The driver logs and shows the output of all ranks. A rank that writes without end would fill the
    memory on the way there.
    """

    def __init__(self, *, now: float) -> None:
        """
        Args:
            now: seconds on a monotonic clock.
        """
        self._tokens = float(BURST)
        self._filled_at = now
        self._left_out = 0
        self._ends_line = True

    def passed(self, text: str, *, now: float) -> str:
        """Return the text to pass on: the whole text, after any notice of dropped output, or "".

        Args:
            now: seconds on the same clock.
        """
        filled = self._tokens + (now - self._filled_at) * PER_SECOND
        self._tokens, self._filled_at = min(float(BURST), filled), now
        # Resume at most once a second: a notice for every piece would be a flood, too.
        needed = max(len(text), PER_SECOND if self._left_out else 0)
        if self._tokens < needed:
            self._left_out += len(text)
            return ""
        self._tokens -= len(text)
        text = self.notice() + text
        self._ends_line = text.endswith("\n")
        return text

    def notice(self) -> str:
        """Return the notice of output dropped since the last notice; "" if none was."""
        if not self._left_out:
            return ""
        megabytes, self._left_out = self._left_out / 1e6, 0
        begin = "" if self._ends_line else "\n"
        return (
            f"{begin}[polytrain: {megabytes:.1f} MB of what this process has written is left out: "
            f"more than {BURST >> 20} MB at once and {PER_SECOND >> 20} MB a second]\n"
        )
