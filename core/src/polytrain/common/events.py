"""What happens to a run: the inputs of the state machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from polytrain.common.errors import Failure, FailureKind
from polytrain_plugins import Offer


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentsPlaced:
    """Every rank of the next attempt has an agent."""

    nodes: tuple[str, ...]
    """Where each rank is: there are as many ranks as nodes named here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementFailed:
    """The agents can't be had."""

    reason: str


class Purpose(StrEnum):
    """What worker processes stop for after their next checkpoint."""

    RESIZE = "to go on with more workers"
    MOVE = "to go on elsewhere"
    STOP = "to stop the run"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainWanted:
    """The worker processes are to make a checkpoint, and stop."""

    purpose: Purpose
    reason: str
    nodes: frozenset[str] = frozenset()
    """Nodes that are about to be taken away."""

    ranks: frozenset[int] = frozenset()
    """Ranks whose agents are to be replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained:
    """A worker process has stopped as it was asked to; its last checkpoint is committed."""

    attempt: int
    rank: int
    stalled_s: float = 0.0
    """Seconds that its training has stood still for checkpoints, so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """A worker process is up and has sent what its peers must know."""

    attempt: int
    rank: int
    offer: Offer


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """A worker process has entered the collective and begins to train."""

    attempt: int
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """A worker process has reported metrics."""

    attempt: int
    rank: int
    step: int
    metrics: Mapping[str, Any]
    stalled_s: float = 0.0
    """Seconds that its training has stood still for checkpoints, so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavesOnRequest:
    """A training function asks whether a checkpoint is wanted: it makes one when one is."""

    attempt: int
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A worker process's training has returned; it waits for the order to leave."""

    attempt: int
    rank: int
    stalled_s: float = 0.0
    """Seconds that its training has stood still for checkpoints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """Something went wrong on a rank that could still say so."""

    attempt: int
    failure: Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Exited:
    """A worker process is gone, and all that it handed over is stored."""

    attempt: int
    rank: int
    how: str
    """How it ended, for people: "killed by SIGKILL", "exited with code 1"."""

    killed: bool
    """Whether it was killed on request, rather than ending by itself."""

    out_of_memory: bool = False
    """Whether the kernel has ended it for want of memory."""

    output: str = ""
    """The last lines that it wrote to its standard error."""

    since_s: float = 0.0
    """Seconds that it had been gone when this was sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLost:
    """An agent is gone, and with it its worker process and its data."""

    rank: int
    reason: str
    kind: FailureKind = FailureKind.AGENT_LOST


Event = (
    AgentsPlaced
    | PlacementFailed
    | DrainWanted
    | Drained
    | Offered
    | Joined
    | Reported
    | SavesOnRequest
    | Done
    | Failed
    | Exited
    | AgentLost
)
