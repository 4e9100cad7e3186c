"""What has become of a run. Pure.

The commands import it at once, and what reads a run, which takes long, when they read one.
"""

from __future__ import annotations

from enum import StrEnum


class RunState(StrEnum):
    """What has become of a run."""

    RUNNING = "running"
    FINISHED = "finished"

    STOPPED = "stopped"
    """Stopped on request. `fit()` resumes it."""

    FAILED = "failed"

    INTERRUPTED = "interrupted"
    """Its driver died, or can't be seen from here. `fit()` resumes it."""

    @property
    def can_resume(self) -> bool:
        """Whether `fit()` continues its training."""
        return self in (RunState.STOPPED, RunState.INTERRUPTED)


def unscored(validation_failure: str) -> str:
    """Return the end of a sentence on a run that has ended, if every validation failed.

    Args:
        validation_failure: why they did; empty if they didn't.
    """
    if not validation_failure:
        return ""
    return f", but no checkpoint has a score: {validation_failure}"


def run_state(*, succeeded: bool | None, stopped: bool, is_held: bool) -> RunState:
    """Return a run's state.

    Args:
        succeeded: as the last driver concluded; None if it hasn't.
        stopped: whether it was stopped on request.
        is_held: whether a driver that may be alive holds the run's lease.
    """
    if succeeded is None:
        return RunState.RUNNING if is_held else RunState.INTERRUPTED
    if stopped:
        return RunState.STOPPED
    return RunState.FINISHED if succeeded else RunState.FAILED
