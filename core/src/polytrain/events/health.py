"""Events about the health of worker processes, which agents send besides those of the run."""

from __future__ import annotations

from dataclasses import dataclass

from polytrain.linux.progress_page import WorkerStage


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A worker process was requested; its time limit to join the others begins."""

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
    """Seconds without progress during which a signal kept it stopped."""

    cpu_s: float
    """CPU seconds spent since the last progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The load of a worker process in a window in which it made progress."""

    attempt: int
    rank: int
    window: int
    """Number of the window since the ranks joined."""

    busy: float
    """Share of the window during which its main thread didn't wait for others, from 0 to 1."""

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
    """A killed worker process hasn't ended in time; its agent stops waiting for it."""

    attempt: int
    rank: int
    pid: int
    """Its process id; 0 if unknown."""

    after_s: float


HealthEvent = Started | WorkerStatus | Load | Stacks | LeaveTimedOut | Unkillable
