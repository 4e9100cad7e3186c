"""A run at a glance, from its journal: its state, and what each attempt came to. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

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
        stopped: whether the run was stopped on request.
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
        run_history: what its journal says.
        owner: who holds its lease, or held it last.
    """
    return run_state(
        succeeded=run_history.succeeded,
        stopped=run_history.is_stopped,
        # Nobody here can look at a driver on another machine: it counts as alive.
        is_held=owner is not None and owner.is_held is not False,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptOverview:
    """One attempt of a run."""

    driver: int
    """Fencing token of the driver's lease."""

    number: int
    """Which of the driver's attempts it is, from 0."""

    num_workers: int
    first_step: int
    """Steps that were done before."""

    launched: float
    """When its worker processes were requested, in seconds since the epoch."""

    ended: float | None = None
    """When it ended; None if it hasn't, or if its driver died."""

    failure: str | None = None
    """What failed, with the rank; None if nothing did."""

    reason: str = ""
    """Why there was another attempt, or not."""


def attempts(entries: Iterable[Mapping[str, Any]]) -> tuple[AttemptOverview, ...]:
    """Read the attempts of a run, over all its drivers, from the entries of its journal."""
    found: list[AttemptOverview] = []
    for entry in entries:
        match entry["event"]:
            case "Opened" if entry["anew"]:
                found.clear()
            case "Launched":
                found.append(
                    AttemptOverview(
                        driver=entry["token"],
                        number=entry["attempt"],
                        num_workers=entry["world_size"],
                        first_step=entry["step"],
                        launched=entry["time"],
                    )
                )
            case "AttemptEnded" | "Concluded" if found and found[-1].ended is None:
                found[-1] = replace(
                    found[-1],
                    ended=entry["time"],
                    failure=_told(entry.get("failure")),
                    reason=entry["reason"],
                )
            case _:
                pass
    return tuple(found)


def _told(failure: Mapping[str, Any] | None) -> str | None:
    if failure is None:
        return None
    rank = "" if failure["rank"] is None else f"rank {failure['rank']}: "
    return f"{failure['kind']}: {rank}{failure['message']}"
