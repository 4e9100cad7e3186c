"""Suggests the next command, to see more of a failure. Pure."""

from __future__ import annotations

import shlex


def next_command(path: str, rank: int | None, *, has_output: bool) -> str:
    """Return the command that shows a rank's whole output, or else the run.

    Args:
        path: the run's directory or address.
        rank: the rank that failed; None if the failure isn't one rank's.
        has_output: whether the rank has printed anything.
    """
    if rank is None or not has_output:
        return f"polytrain show {shlex.quote(path)}"
    return f"polytrain logs {shlex.quote(path)} --rank {rank}"
