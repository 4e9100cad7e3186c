"""The output of worker processes on standard output and error, its way, and its limit."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Some text that a worker process wrote; it may end in the middle of a line."""

    attempt: int
    rank: int | None
    """The rank; None for the process that validates a checkpoint."""

    stream: str
    """"stdout" or "stderr"."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BarMoved:
    """The progress bars of a rank have moved. They become output when they end."""

    attempt: int
    rank: int
    rows: tuple[str, ...]
    """The bars, from the top; empty if there are none any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputRoute:
    """How the output of worker processes gets to the user."""

    one_pipe: bool = False
    """Whether both streams have one pipe, which keeps their order: the driver's standard output
    and error are the same terminal, pipe or file, so nobody has to tell them apart."""

    shows_bars: bool = False
    """Whether states of progress bars are shown while they move."""


ERROR_BEGINS, ERROR_ENDS = "\x0e", "\x0f"
"""Around standard error, where both streams have one pipe: shift out and shift in, which text of
our time has no use for."""


def flush_output() -> None:
    """Flush this process's output, including an unfinished line."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()


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
            text: the text.
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
