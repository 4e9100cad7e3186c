"""What worker processes write on their standard output and error, and how much of it counts."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Some text that a worker process wrote; it may end in the middle of a line."""

    attempt: int
    rank: int | None
    """None for the process that validates a checkpoint."""

    stream: str
    """"stdout" or "stderr"."""

    text: str


def flush_output() -> None:
    """Write what this process has printed, also a line without an end."""
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()


PER_SECOND = 1 << 20
"""Characters a second that a stream may write for as long as it likes."""

BURST = 8 << 20
"""Characters that it may write at once, after it has written little."""


class OutputLimit:
    """A token bucket for one stream of a rank. Pure.

    The driver writes down what all ranks write, and shows it. A rank that writes without end would
    fill the memory on the way there.
    """

    def __init__(self, *, now: float) -> None:
        """
        Args:
            now: on any clock that goes on, in seconds.
        """
        self._tokens = float(BURST)
        self._filled_at = now
        self._left_out = 0
        self._ends_line = True

    def passed(self, text: str, *, now: float) -> str:
        """What of a piece of output is passed on: all of it, after what is to be said, or nothing.

        Args:
            text: what was written.
            now: on the same clock.
        """
        filled = self._tokens + (now - self._filled_at) * PER_SECOND
        self._tokens, self._filled_at = min(float(BURST), filled), now
        # Once a second at most it passes again: a notice for every piece would be a flood, too.
        needed = max(len(text), PER_SECOND if self._left_out else 0)
        if self._tokens < needed:
            self._left_out += len(text)
            return ""
        self._tokens -= len(text)
        text = self.notice() + text
        self._ends_line = text.endswith("\n")
        return text

    def notice(self) -> str:
        """What is to be said of output that was left out since this was said; empty if nothing."""
        if not self._left_out:
            return ""
        megabytes, self._left_out = self._left_out / 1e6, 0
        begin = "" if self._ends_line else "\n"
        return (
            f"{begin}[polytrain: {megabytes:.1f} MB of what this process has written is left out: "
            f"more than {BURST >> 20} MB at once and {PER_SECOND >> 20} MB a second]\n"
        )
