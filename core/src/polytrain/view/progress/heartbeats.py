"""When a line says that a run still lives, where lines stay: more and more rarely. Pure."""

from __future__ import annotations

from collections.abc import Iterator

FIRST_S = 30.0
LONGEST_S = 600.0
"""Ten minutes: a log of a week gets a thousand lines."""


def heartbeat_pauses() -> Iterator[float]:
    """Yield the seconds from each line to the next: each twice the one before, up to a limit."""
    pause_s = FIRST_S
    while True:
        yield min(pause_s, LONGEST_S)
        pause_s *= 2
