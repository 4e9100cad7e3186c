"""What worker processes write on their standard output and error."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Some text that a worker process wrote; it may end in the middle of a line."""

    attempt: int
    rank: int
    stream: str
    """"stdout" or "stderr"."""

    text: str
