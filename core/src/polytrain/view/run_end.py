"""What has become of a run, in a few words: the same on a page and in a terminal. Pure."""

from __future__ import annotations

from polytrain.record.state import RunState


def run_end(
    state: RunState, *, seconds: float, reason: str, was_stopped: bool, driver: str | None
) -> str:
    """Return what has become of a run, without a capital letter or a full stop.

    Args:
        state: its state.
        seconds: the run's own time, over all its drivers.
        reason: of its conclusion; empty if there is none.
        was_stopped: whether somebody, or a stop condition, ended it early.
        driver: who holds its lease, or held it last.
    """
    took = duration(seconds)
    why = f" ({reason})" if reason else ""
    match state:
        case RunState.RUNNING:
            return f"still running after {took}"
        case RunState.INTERRUPTED:
            who = f"its driver ({driver})" if driver else "its driver"
            return f"interrupted after {took}: {who} died, and fit() resumes it"
        case RunState.STOPPED:
            return f"stopped after {took}{why}: fit() resumes it"
        case RunState.FAILED:
            return f"failed after {took}{why}"
        case RunState.FINISHED:
            return f"finished in {took}{why if was_stopped else ''}"


def duration(seconds: float) -> str:
    """Return a length of time for people: "3.2 s", "4 min 5 s", "2 d 3 h"."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h"
