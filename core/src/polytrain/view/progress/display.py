"""Shows the progress of a run, as its journal grows: on a terminal, in a log or in a notebook."""

from __future__ import annotations

import contextlib
import html
import itertools
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any, Literal, TextIO, TypeVar

from polytrain.output.call_queues import CallQueue, CallQueues
from polytrain.output.echo import (
    Style,
    has_colours,
    is_notebook,
    painted,
    takes_sequences,
    write_line,
)
from polytrain.output.line_layout import printable
from polytrain.output.worker_output import LiveBars
from polytrain.record.entries import Entry, MetricsReported
from polytrain.record.journal import Take
from polytrain.record.ledger import Ledger
from polytrain.record.progress import Progress
from polytrain.view.progress.as_json import ended_line, event_line, progress_line, started_line
from polytrain.view.progress.status_lines import StatusLines
from polytrain.view.progress.text import (
    UNICODE,
    bar_lines,
    end_style,
    ended,
    event_lines,
    event_style,
    heartbeat,
    signs_for,
    started,
    state_lines,
    state_styled,
)
from polytrain_plugins import RunInfo

logger = logging.getLogger(__name__)

FIRST_S = 30.0
"""Seconds to the first line that says that a run still lives, where lines stay."""

LONGEST_S = 600.0
"""Ten minutes: a log of a week gets a thousand lines."""

Mode = Literal["live", "notebook", "plain", "json", "none"]

_DRAW_EVERY_S = 0.25
_MOST_BARS, _ROWS_PER_BAR = 8, 4
"""Bars have at most this many rows of a terminal, and at most one of four."""

_NOTEBOOK_EVERY_S = 1.0
_JSON_EVERY_S = 1.0
_NOTEBOOK_WIDTH = 100
_NOTEBOOK_EVENTS = 20
"""Lines of events that stay in a notebook's output."""

_START_WITHIN_S = 0.5
"""Seconds that a run waits for its first lines: so they stand above what follows."""

Text = TypeVar("Text")

_bottom_of_terminal = threading.Lock()
"""Held by the run whose lines stay at the bottom of the terminal."""


def mode_of(progress: str | bool, stream: TextIO | None) -> Mode:
    """Return how progress is shown.

    Args:
        progress: as the user passed it in `RunConfig`.
        stream: standard error; a program may have none.
    """
    if progress is False or progress == "none":
        return "none"
    if progress in ("auto", "live", True) and is_notebook():
        return "notebook"
    if stream is None or getattr(stream, "closed", False):
        return "none"
    match progress:
        case "json":
            return "json"
        case "plain":
            return "plain"
        case _:
            return "live" if takes_sequences(stream) and _has_descriptor(stream) else "plain"


def _has_descriptor(stream: TextIO) -> bool:
    # A program's own object may pass text on to a terminal, and have little more than `write`.
    try:
        return stream.fileno() >= 0
    except (AttributeError, OSError, ValueError):
        return False


@contextlib.contextmanager
def shown_progress(
    run: RunInfo,
    progress: str | bool,
    ledger: Ledger,
    stream: TextIO | None = None,
    *,
    now: Callable[[], float],
    queues: CallQueues | None = None,
    bars: LiveBars | None = None,
    is_over: Callable[[], bool] = lambda: True,
) -> Iterator[Take]:
    """Show a run's progress; yield what takes each line of its journal, and never raises.

    Args:
        progress: `RunConfig.progress`.
        ledger: the journal's ledger, which has each line before it is taken here.
        stream: where it is shown, outside notebooks; on standard error by default.
        now: reads the clock of the journal, in seconds since the epoch.
        queues: those of the run, if it has any. All writing is done on the thread of one of them.
        bars: the ranks' progress bars, which a terminal shows while they move.
        is_over: returns, when the context ends, whether the run has ended, too; if not, no end of
            it is shown.
    """
    stream = sys.stderr if stream is None else stream
    mode = mode_of(progress, stream)
    if mode == "none":
        yield lambda entry: None
        return
    progress_so_far = Progress(ledger=ledger, since=now(), world_size=max(1, run.num_workers))
    with contextlib.ExitStack() as stack:
        queues = stack.enter_context(CallQueues()) if queues is None else queues
        follower = _Follower(run, progress_so_far, stream, clock=now, queue=queues.of(stream))
        follower.bars, follower.is_over = bars, is_over
        stack.callback(follower.queue.finish)
        _DISPLAYS[mode](follower, stack)
        follower.queue.finish(stuck_after_s=_START_WITHIN_S, within_s=_START_WITHIN_S)
        yield follower.take


class _Follower:
    """What all displays share: the run's progress, its lock, and a stream that may break."""

    def __init__(
        self,
        run: RunInfo,
        progress: Progress,
        stream: TextIO,
        *,
        clock: Callable[[], float],
        queue: CallQueue,
    ) -> None:
        self.run = run
        self.progress = progress
        self.lock = threading.Lock()
        self.stream = stream
        self.has_colours = has_colours(stream)
        self.clock = clock
        self.queue = queue
        self.bars: LiveBars | None = None
        self.is_over: Callable[[], bool] = lambda: True
        self.on_event: Take = lambda entry: None
        self._is_broken = False

    def take(self, entry: Entry) -> None:
        """Take a line of the journal."""
        if self._is_broken:
            return
        try:
            with self.lock:
                self.progress.take(entry)
                # Most lines are reports, and are shown by the next tick.
                if not isinstance(entry, MetricsReported):
                    self.on_event(entry)
        except Exception:  # what is shown of a run must not end it
            self._is_broken = True
            logger.exception("A run's progress can't be shown any more; the run continues.")

    def now(self, describe: Callable[..., Text]) -> Text:
        """Return the run's progress as a function describes it at this moment.

        The lock is released by the time that it is written: a terminal may be held (Ctrl-S).
        """
        with self.lock:
            return describe(self.run, self.progress, now=self.clock())

    def print_events(self, stack: contextlib.ExitStack) -> None:
        """Print the run's start now, a line for each event, and its end when the stack unwinds."""

        def print_event(entry: Entry) -> None:
            style = event_style(entry)
            for line in event_lines(self.run, self.progress, entry):
                self.print_line(line, style)

        self.print_line(started(self.run))
        self.on_event = print_event

        def print_end() -> None:
            if not self.is_over():
                return
            style = end_style(self.progress)
            for line in ended(self.run, self.progress):
                self.print_line(line, style)
                style = Style.PLAIN

        stack.callback(print_end)

    def print_line(self, line: str, style: Style = Style.PLAIN) -> None:
        """Have a line printed, unless the reader of the stream is gone."""
        self.queue.submit(partial(self._print, line, style), size=len(line))

    def _print(self, line: str, style: Style) -> None:
        if self._is_broken:
            return
        try:
            text = printable(line)
            write_line(painted(text, style) if self.has_colours else text, self.stream)
        except (OSError, ValueError):
            self._is_broken = True

    def draw_again(
        self, stack: contextlib.ExitStack, draw: Callable[[], None], pauses: Iterator[float]
    ) -> None:
        """Draw after each of some pauses, until the stack unwinds."""
        self.queue.repeat(draw, pauses)
        stack.callback(self.queue.stop_repeating)


def _plain(follower: _Follower, stack: contextlib.ExitStack) -> None:
    def beat() -> None:
        follower.print_line(follower.now(heartbeat))

    follower.print_events(stack)
    follower.draw_again(stack, beat, heartbeat_pauses())


def _live(follower: _Follower, stack: contextlib.ExitStack) -> None:
    if not _bottom_of_terminal.acquire(blocking=False):
        # Another run of this process has its lines there.
        _plain(follower, stack)
        return
    stack.callback(_bottom_of_terminal.release)
    stack.callback(follower.queue.finish)
    signs = signs_for(getattr(follower.stream, "encoding", None))

    def lines(size: os.terminal_size) -> Sequence[str]:
        width = size.columns
        bars = [] if follower.bars is None else follower.bars.rows()
        room = min(_MOST_BARS, size.lines // _ROWS_PER_BAR)
        return (
            *bar_lines(bars[:room], follower.progress.world_size, width=width, signs=signs),
            *follower.now(partial(state_lines, width=width, signs=signs)),
        )

    if follower.bars is not None:
        follower.bars.are_shown = True
    follower.print_events(stack)
    styled = partial(state_styled, signs=signs) if follower.has_colours else list
    status = StatusLines(follower.stream, lines, styled=styled)
    follower.queue.submit(status.open)
    stack.callback(follower.queue.submit, status.close)
    follower.draw_again(stack, status.draw, itertools.repeat(_DRAW_EVERY_S))


def _notebook(follower: _Follower, stack: contextlib.ExitStack) -> None:
    output, events = NotebookOutput(), deque([started(follower.run)], maxlen=_NOTEBOOK_EVENTS)
    state = partial(state_lines, width=_NOTEBOOK_WIDTH, signs=UNICODE)

    def take_event(entry: Entry) -> None:
        events.extend(event_lines(follower.run, follower.progress, entry))

    def show() -> None:
        output.show([*events, *follower.now(state)])

    def show_end() -> None:
        if follower.is_over():
            output.show([*events, *ended(follower.run, follower.progress)])

    follower.on_event = take_event
    follower.queue.submit(show)
    stack.callback(follower.queue.submit, show_end)
    follower.draw_again(stack, show, itertools.repeat(_NOTEBOOK_EVERY_S))


def _json(follower: _Follower, stack: contextlib.ExitStack) -> None:
    printed = None

    def print_event(entry: Entry) -> None:
        line = event_line(follower.run, entry)
        if line is not None:
            follower.print_line(line)

    def print_progress() -> None:
        nonlocal printed
        progress = follower.progress
        news = progress.stage, progress.step, progress.restarts
        if news != printed:
            printed = news
            follower.print_line(follower.now(progress_line))

    def print_end() -> None:
        if follower.is_over():
            follower.print_line(follower.now(ended_line))

    follower.print_line(started_line(follower.run, now=follower.clock()))
    follower.on_event = print_event
    stack.callback(print_end)
    follower.draw_again(stack, print_progress, itertools.repeat(_JSON_EVERY_S))


_DISPLAYS: Mapping[str, Callable[[_Follower, contextlib.ExitStack], None]] = {
    "plain": _plain,
    "live": _live,
    "notebook": _notebook,
    "json": _json,
}


def heartbeat_pauses() -> Iterator[float]:
    """Yield the seconds from each line to the next: each twice the one before, up to a limit."""
    pause_s = FIRST_S
    while True:
        yield min(pause_s, LONGEST_S)
        pause_s *= 2


class NotebookOutput:
    """Shows lines of text below the cell that runs when the first lines are shown."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._shown: list[str] = []

    def show(self, lines: Sequence[str]) -> None:
        """Replace the shown lines."""
        if list(lines) == self._shown:
            return
        self._shown = list(lines)
        # Import it late: only a notebook's kernel needs it, and has it.
        ipython = import_module("IPython.display")
        page = ipython.HTML(as_html(lines))
        if self._handle is None:
            self._handle = ipython.display(page, display_id=True)
        else:
            self._handle.update(page)


def as_html(lines: Sequence[str]) -> str:
    """Return lines of text as HTML."""
    text = html.escape("\n".join(lines))
    return f'<pre style="white-space: pre-wrap; line-height: 1.4; margin: 0">{text}</pre>'
