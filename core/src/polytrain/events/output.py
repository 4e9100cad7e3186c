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
    # The first streams are replaced in worker processes, and libraries may still have them.
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        with contextlib.suppress(Exception):
            stream.flush()  # type: ignore[union-attr]  # a process may have none
