"""What has become of a run. Pure.

The commands import it at once, and `history`, which takes long, when they read a run.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polytrain.record.history import RunHistory
    from polytrain.run.lease import Holder


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


def run_state(*, succeeded: bool | None, stopped: bool, is_held: bool) -> RunState:
    """Return a run's state.

    Args:
        succeeded: as the last driver concluded; None if it hasn't.
        is_held: whether a driver that may be alive holds the run's lease.
    """
    if succeeded is None:
        return RunState.RUNNING if is_held else RunState.INTERRUPTED
    if stopped:
        return RunState.STOPPED
    return RunState.FINISHED if succeeded else RunState.FAILED


def state_of(run_history: RunHistory, owner: Holder | None) -> RunState:
    """Return the state of a run that was read from its storage.

    Args:
        owner: who holds its lease, or held it last.
    """
    return run_state(
        succeeded=run_history.succeeded,
        stopped=run_history.is_stopped,
        # Nobody here can look at a driver on another machine: it counts as alive.
        is_held=owner is not None and owner.is_held is not False,
    )
