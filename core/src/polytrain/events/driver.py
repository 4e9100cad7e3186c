"""The events of a run's driver: what its own threads have for the controller.

They arrive in the mailbox between the events of agents, in the order in which they happened.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TaskEnded:
    """A background task has an outcome, which `BackgroundTasks.results` yields."""


@dataclass(frozen=True, slots=True)
class WorkEnded:
    """Attached work has a result, which `AttachedWork.take` returns."""


@dataclass(frozen=True, slots=True)
class GitAnswered:
    """Git has answered: see `CommitSearch`."""


@dataclass(frozen=True, slots=True)
class LeaseLost:
    """Another driver has taken the run over: see `Lease.lost`."""


@dataclass(frozen=True, slots=True)
class StacksWanted:
    """Another process wants the stacks of all ranks."""

    request: str
    """The path of its request, to be answered by `RemoteRequests.answer`."""


@dataclass(frozen=True, slots=True)
class Interrupted:
    """Another thread wants the run to end at once: the next wait raises `KeyboardInterrupt`."""


DriverEvent = TaskEnded | WorkEnded | GitAnswered | LeaseLost | StacksWanted | Interrupted
