"""Events about the health of worker processes, which agents send besides those of the run."""

from __future__ import annotations

from dataclasses import dataclass

from polytrain.linux.progress_page import WorkerStage


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A worker process was requested; from now on it has limited time to join the others."""

    attempt: int
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """The state of a worker process that has joined; sent when it changes noticeably."""

    attempt: int
    rank: int
    stage: WorkerStage
    quiet_s: float
    """Seconds without progress."""

    idle_s: float
    """Seconds without progress since it or a descendant last used significant CPU time."""

    stopped_s: float
    """Seconds without progress for which a signal has kept it stopped."""

    cpu_s: float
    """CPU time spent since the last progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How busy a worker process was in a window in which it made progress."""

    attempt: int
    rank: int
    window: int
    """Number of the window, counted from when the ranks joined."""

    busy: float
    """Share of the time in which its main thread didn't wait for others."""

    memory: int = 0
    """Resident bytes of the process at the end of the window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stacks:
    """The stacks of a worker process."""

    attempt: int
    rank: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveTimedOut:
    """A worker process was asked to leave, didn't, and has been killed."""

    attempt: int
    rank: int
    after_s: float
    stacks: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Unkillable:
    """A worker process was killed and hasn't ended; it isn't waited for any more."""

    attempt: int
    rank: int
    pid: int
    """0 if nobody has said which it is."""

    after_s: float


HealthEvent = Started | WorkerStatus | Load | Stacks | LeaveTimedOut | Unkillable
