"""What the state machine wants done: carried out by the controller, in order."""

from __future__ import annotations

from dataclasses import dataclass

from polytrain.checkpoint.events import Committed, PartStaged, PartStored, PartVoid
from polytrain.common.errors import Failure
from polytrain.common.events import Reported
from polytrain_plugins import Offer


@dataclass(frozen=True, slots=True, kw_only=True)
class AcquireWorkers:
    """Have an agent for every rank of the next attempt."""

    avoid: frozenset[str] = frozenset()
    """Nodes to leave, if others can hold the workers."""

    without: frozenset[int] = frozenset()
    """Ranks of the last attempt whose agents are to be replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Fork a worker process for every rank."""

    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SendRoster:
    """Tell every worker process everybody's offer."""

    attempt: int
    offers: tuple[Offer, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Publish:
    """A report counts: history and observers get it."""

    report: Reported


@dataclass(frozen=True, slots=True, kw_only=True)
class CountPart:
    """A rank is as far as this checkpoint."""

    part: PartStaged


@dataclass(frozen=True, slots=True, kw_only=True)
class AddPart:
    """A part of a checkpoint counts: the checkpoint is committed once it has all of them."""

    part: PartStored


@dataclass(frozen=True, slots=True, kw_only=True)
class DropCheckpoint:
    """A checkpoint won't come to be; its other parts are of no use."""

    part: PartVoid


@dataclass(frozen=True, slots=True, kw_only=True)
class AddCheckpoint:
    """A checkpoint is the newest: ranks and observers are told, older ones may go."""

    committed: Committed


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """Have every worker process make a checkpoint, and stop."""

    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """Every rank is done: let all leave the collective and end."""

    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """End every worker process of the attempt at once."""

    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EndAttempt:
    """Every process of an attempt that didn't finish is gone."""

    attempt: int
    reason: str
    root: Failure | None
    """Why it failed; None if the run itself has ended it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conclude:
    """The run is over, or this driver stops working on it."""

    succeeded: bool
    reason: str
    stopped: bool = False
    """Whether it was asked to stop, and can be resumed."""

    failures: tuple[Failure, ...] = ()


Action = (
    AcquireWorkers
    | Launch
    | SendRoster
    | Publish
    | CountPart
    | AddPart
    | DropCheckpoint
    | AddCheckpoint
    | Drain
    | Leave
    | Kill
    | EndAttempt
    | Conclude
)
