"""What happens to a run: the inputs of the state machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from polytrain.checkpoint.manifest import Manifest, StoredFile
from polytrain.errors import Failure, FailureKind
from polytrain_plugins import Offer


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentsPlaced:
    """Every rank of the next generation has an agent."""

    nodes: tuple[str, ...]
    """Where each rank is: there are as many ranks as nodes named here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementFailed:
    """The agents can't be had."""

    reason: str


class Purpose(StrEnum):
    """What trainers stop for after their next checkpoint."""

    RESIZE = "to go on with more workers"
    MOVE = "to go on elsewhere"
    STOP = "to stop the run"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainWanted:
    """The trainers are to make a checkpoint, and stop."""

    purpose: Purpose
    reason: str
    nodes: frozenset[str] = frozenset()
    """Nodes that are about to be taken away."""

    ranks: frozenset[int] = frozenset()
    """Ranks whose agents are to be replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained:
    """A trainer has stopped as it was asked to; its last checkpoint is committed."""

    generation: int
    rank: int
    stalled_s: float = 0.0
    """Seconds that its training has stood still for checkpoints, so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """A trainer is up and has told what its peers must know."""

    generation: int
    rank: int
    offer: Offer


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """A trainer has entered the collective and begins to train."""

    generation: int
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """A trainer has reported metrics."""

    generation: int
    rank: int
    step: int
    metrics: Mapping[str, Any]
    stalled_s: float = 0.0
    """Seconds that its training has stood still for checkpoints, so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandedIn:
    """A trainer has handed its part of a checkpoint over to its agent."""

    generation: int
    rank: int
    checkpoint: int
    """The checkpoint's number in the run."""

    waits: bool
    """Whether it makes no other before this one is committed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartStored:
    """One rank's part of a checkpoint lies in its final place; nothing is committed yet."""

    generation: int
    rank: int
    checkpoint: int
    step: int
    metrics: Mapping[str, Any]
    positions: Mapping[str, Any]
    """Data set → where the rank stood in it, as plain values."""

    files: tuple[StoredFile, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartVoid:
    """One rank's part of a checkpoint isn't any more what was reported."""

    generation: int
    rank: int
    checkpoint: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """A checkpoint's manifest is written."""

    manifest: Manifest
    stamps: Mapping[str, tuple[int, ...]]
    """What changes whenever one of its files does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A trainer's training has returned; it waits to be told to leave."""

    generation: int
    rank: int
    stalled_s: float = 0.0
    """Seconds that its training has stood still for checkpoints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """Something went wrong on a rank that could still say so."""

    generation: int
    failure: Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Exited:
    """A trainer's process is gone, and all that it handed over is stored."""

    generation: int
    rank: int
    how: str
    """How it ended, for people: "killed by SIGKILL", "exited with code 1"."""

    killed: bool
    """Whether it was told to end, rather than ending by itself."""

    out_of_memory: bool = False
    """Whether the kernel has ended it for want of memory."""

    output: str = ""
    """The last lines that it wrote to its standard error."""

    since_s: float = 0.0
    """Seconds that it had been gone when this was told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLost:
    """An agent is gone, and with it its trainer and its data."""

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
    | HandedIn
    | PartStored
    | PartVoid
    | Committed
    | Done
    | Failed
    | Exited
    | AgentLost
)
