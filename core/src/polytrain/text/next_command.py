"""What to type next, to see more of a failure. Pure."""

from __future__ import annotations

import shlex


def next_command(path: str, rank: int | None, *, has_output: bool) -> str:
    """Return the command that shows all that a rank printed, or else the run.

    Args:
        path: the run's directory or address.
        rank: the rank whose failure it is; None if it isn't that of one rank.
        has_output: whether the rank has printed anything.
    """
    if rank is None or not has_output:
        return f"polytrain show {shlex.quote(path)}"
    return f"polytrain logs {shlex.quote(path)} --rank {rank}"
