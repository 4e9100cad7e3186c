"""The actions of the state machine, which the controller carries out in order.

Some are calls to the agents of all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from polytrain.errors import Failure
from polytrain.workers.agents.calls import DrainAttempt, Kill, Leave, SendRoster
from polytrain_plugins import Stopped


@dataclass(frozen=True, slots=True, kw_only=True)
class AcquireWorkers:
    """Acquire an agent for every rank of the next attempt."""

    avoid: frozenset[str] = frozenset()
    """Nodes to avoid, if others can hold the workers."""

    without: frozenset[int] = frozenset()
    """Ranks of the last attempt whose agents must be replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Fork a worker process for every rank."""

    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EndAttempt:
    """End an unfinished attempt, whose processes are all gone."""

    attempt: int
    reason: str
    root: Failure | None
    """The failure that caused the others; None for a planned end."""

    failures: tuple[Failure, ...] = ()
    """All failures, the root first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conclude:
    """End the run, or stop working on it in this driver."""

    succeeded: bool
    reason: str
    stopped: Stopped | None = None
    """The user, signal or condition that ended the run; None if its training has ended."""

    failures: tuple[Failure, ...] = ()

    validation_failure: str = ""
    """The reason that no checkpoint has a score if every validation failed; else empty."""


Action = AcquireWorkers | Launch | SendRoster | DrainAttempt | Leave | Kill | EndAttempt | Conclude
