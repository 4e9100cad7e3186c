"""The calls that the driver sends to agents, with the bytes that all share, and agents' events.

`Agent.carry_out` implements the calls.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from polytrain.checkpoint.parts import CheckpointEvent, CheckpointsAsked, StateWritten
from polytrain.events.attempt import (
    CopiesHeld,
    CopyRefused,
    CopySent,
    Event,
    ExactnessFound,
    HealthEvent,
    KeepsNothing,
    KeepsState,
    KeptRead,
    Reported,
    StateDigested,
    StateUnwritten,
)
from polytrain.events.notices import PreemptionInfo
from polytrain.events.output import BarMoved, Output
from polytrain.linux.kept_states import KeptState
from polytrain.workers.processes.channel import Message
from polytrain.workers.session.messages import END, LEAVE
from polytrain_plugins import Offer

if TYPE_CHECKING:
    import pyarrow as pa

    from polytrain.data.shards.shared_memory import Extent
    from polytrain.workers.agents.shard_cache import CacheRequest
    from polytrain.workers.session.job import LaunchOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedBytes:
    """Shared bytes that an agent has opened."""

    descriptor: int
    extent: Extent | None = None
    """The extent in the descriptor's memory; None for all of it."""

    kept: Any = None
    """An object that must exist while the memory is used, such as one of Ray's."""


class SharedBytes(Protocol):
    """Bytes of the driver that all agents can read."""

    def open(self) -> OpenedBytes:
        """Open the bytes in an agent."""

    def fetch(self) -> object:
        """Bring the bytes to this node, in an agent. They stay while what is returned exists."""

    def close(self) -> None:
        """Free the bytes, in the driver."""


class SharedStore(Protocol):
    """Stores bytes of the driver for all agents."""

    @property
    def reference_type(self) -> type | tuple[type, ...]:
        """Types in a data set that must be sent separately."""

    def share(self, content: pa.Buffer) -> SharedBytes:
        """Put bytes where all agents can read them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAssignment:
    """The rank of an agent, with the rank's rows."""

    rank: int
    world_size: int
    data: CacheRequest | None
    """The rows of this rank; None if the run has no data sets."""


class StreamOrder(Protocol):
    """The source of an agent's parts of a streaming data set."""

    def open_line(self, *, world_size: int, rank: int) -> socket.socket:
        """Open a connection for a new worker process, which a thread of the agent serves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchProcess:
    """Request a worker process for a new attempt, with its data and starting point."""

    order: LaunchOrder
    streams: tuple[StreamOrder, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchShared:
    """Bring what all agents share to the node of an agent that has no rank yet."""

    shared: tuple[SharedBytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OfAttempt:
    """What concerns the worker process of one attempt."""

    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SendRoster(OfAttempt):
    """Send all offers to the worker process."""

    offers: tuple[Offer, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainAttempt(OfAttempt):
    """Ask the worker process to make a checkpoint and stop."""

    preemption: PreemptionInfo | None = None
    """The nodes that are about to be taken away, if that is the reason."""

    ends_run: bool = False
    """Whether the run ends then by a signal: nothing is waited for that may take long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave(OfAttempt):
    """Let the worker process leave the collective and end: all ranks are done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill(OfAttempt):
    """Kill the worker process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadStacks(OfAttempt):
    """Read the stacks of the worker process; leads to `Stacks` in a bounded time."""

    pausing: bool
    """Whether the process may be paused for the dump."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreRest(OfAttempt):
    """Store a rank's part, which its agent has held back until rank 0's part was stored."""

    checkpoint: int
    stored_already: Mapping[str, str] | None
    """Name → SHA-256 of rank 0's files; None drops the part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Acknowledge(OfAttempt):
    """Notify the worker process that this checkpoint is committed or dropped."""

    checkpoint: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SendCheckpoints(OfAttempt):
    """Answer the worker process's request for the run's checkpoints."""

    number: int
    """The number of the request."""

    checkpoints: Sequence[Any]
    """Path, metrics and status of each, as plain values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadKept(OfAttempt):
    """Read the rank's small states; leads to `KeptRead`, whether or not its process lives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteState(OfAttempt):
    """Have the worker process write its state as a checkpoint.

    Leads to `StateWritten` or `StateUnwritten` in a bounded time.
    """

    checkpoint: int
    """The checkpoint's number."""

    point: int
    """The newest clean point that any rank has reached."""

    kept: Mapping[int, Sequence[KeptState]]
    """Rank → its small states."""

    settles_s: float
    """Seconds that the process may wait for a clean point."""

    limit_s: float
    """Seconds in which it has to have written the state."""

    kills: bool
    """Whether the process is killed while the state is stored. Its peers may end because of that:
    if no loss has ended the attempt, their ends would seem to have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreCopy(OfAttempt):
    """Store a copy of the rank's part of the state, whose process is gone.

    Leads to `StateWritten` or `StateUnwritten`.
    """

    checkpoint: int
    """The checkpoint's number."""

    number: int
    """The copy's number."""

    of_rank: int | None = None
    """The rank of another host whose copy the agent keeps; None for its own rank's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendCopies(OfAttempt):
    """Send the next copy to the neighbour: the first one from a number on."""

    number: int
    """The number."""

    common: int | None
    """The newest copy that all ranks have sent, which stays meanwhile; None if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DropCopy(OfAttempt):
    """Have the worker process drop a copy of the state: not every rank has its part."""

    number: int
    """The copy's number; 0 for none."""

    is_last: bool
    """Whether no copies are made any more."""


SurvivorEvent = (
    KeepsState
    | KeepsNothing
    | KeptRead
    | StateWritten
    | StateUnwritten
    | CopyRefused
    | CopiesHeld
    | CopySent
)

ForWorker = SendRoster | DrainAttempt | Leave | Acknowledge | SendCheckpoints | DropCopy
"""A call that an agent passes on to the worker process."""

Call = ForWorker | Kill | ReadStacks | StoreRest | ReadKept | WriteState | StoreCopy | SendCopies
"""A call that concerns the worker process of an attempt."""

AgentCall = Call | LaunchProcess | FetchShared

AgentEvent = (
    Event
    | Reported
    | CheckpointEvent
    | CheckpointsAsked
    | StateDigested
    | ExactnessFound
    | SurvivorEvent
    | Output
    | BarMoved
    | HealthEvent
)
"""An event of an agent's worker process."""


def message_of(call: ForWorker) -> Message:
    """Return the message to the worker process."""
    match call:
        case SendRoster(offers=offers):
            return ["roster", [[offer.host, offer.port, dict(offer.details)] for offer in offers]]
        case DrainAttempt(preemption=preemption, ends_run=ends_run):
            if preemption is None:
                return END if ends_run else ["drain"]
            ranks_by_node = preemption.preempted_node_to_ranks.items()
            nodes = {node: list(ranks) for node, ranks in ranks_by_node}
            return ["drain", preemption.deadline_ms, nodes]
        case Leave():
            return LEAVE
        case Acknowledge(checkpoint=checkpoint):
            return ["settled", checkpoint]
        case SendCheckpoints(number=number, checkpoints=checkpoints):
            return ["checkpoints", number, [list(each) for each in checkpoints]]
        case DropCopy(number=number, is_last=is_last):
            return ["drop copy", number, is_last]
