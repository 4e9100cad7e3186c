"""The events of a run's attempts. All except reports and health are inputs of the state machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from polytrain.errors import Failure, FailureKind
from polytrain.events.notices import LeavingNode, Rollback, earliest
from polytrain.functions.return_values import Returned
from polytrain.linux.kept_states import KeptState
from polytrain.linux.nvidia_gpus import GpuUse
from polytrain.linux.progress_page import WorkerStage
from polytrain_plugins import Offer, Stopped


@dataclass(frozen=True, slots=True, kw_only=True)
class OfRank:
    """What concerns one rank of one attempt."""

    attempt: int
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OfTraining(OfRank):
    """What concerns one rank's training, and how long it has stood still so far."""

    stalled_s: float = 0.0
    """Seconds for checkpoints."""

    copied_s: float = 0.0
    """Seconds for copies of its state in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentsPlaced:
    """Every rank of the next attempt has an agent."""

    nodes: tuple[str, ...]
    """The node of each rank, in rank order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementFailed:
    """The agents can't be started."""

    reason: str


class Purpose(StrEnum):
    """The reason for which worker processes stop after their next checkpoint."""

    RESIZE = "to continue with more workers"
    MOVE = "to continue on other nodes"
    STOP = "to stop the run"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainWanted:
    """The worker processes should make a checkpoint and stop."""

    purpose: Purpose
    reason: str
    nodes: frozenset[str] = frozenset()
    """Nodes that are marked for removal."""

    deadline_ms: int | None = None
    """When the first of them is taken away, in milliseconds since the epoch, if that is known."""

    ranks: frozenset[int] = frozenset()
    """Ranks whose agents must be replaced."""

    stopped: Stopped | None = None
    """The user, signal or condition that stops the run, if that is the purpose."""

    until_step: int = 0
    """The step that a committed checkpoint must have reached before the run may stop."""

    otherwise: Stopped | None = None
    """A later request to stop, which counts if that checkpoint is lost."""


def move_wanted(nodes: Mapping[str, LeavingNode]) -> DrainWanted:
    """Return the drain that moves a run away from nodes, by their ids."""
    named = ", ".join(sorted(node.address for node in nodes.values()))
    which = f"the node {named} is" if len(nodes) == 1 else f"the nodes {named} are"
    return DrainWanted(
        purpose=Purpose.MOVE,
        reason=f"{which} about to be taken away",
        nodes=frozenset(nodes),
        deadline_ms=earliest([node.deadline_ms for node in nodes.values()]),
    )


def stop_wanted(stopped: Stopped, *, until_step: int = 0) -> DrainWanted:
    """Return the drain that stops a run."""
    return DrainWanted(
        purpose=Purpose.STOP, reason=str(stopped), stopped=stopped, until_step=until_step
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionMet(OfRank):
    """A report of rank 0 meets a condition that ends the run."""

    stopped: Stopped


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained(OfTraining):
    """A worker process has stopped on request; its last checkpoint is committed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered(OfRank):
    """A worker process has started and sent its offer for its peers."""

    offer: Offer


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined(OfRank):
    """A worker process has entered the collective and begins to train."""

    rows: Mapping[str, int] = field(default_factory=dict)
    """Data set → number of its rows on this rank; data sets with uncounted rows are left out."""

    device: str = ""
    """The device that it computes on, such as "CPU"."""

    node: str = ""
    """The name of its machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported(OfTraining):
    """A worker process has reported metrics."""

    step: int
    metrics: Mapping[str, Any]
    has_checkpoint: bool = False
    """Whether the rank has staged its part of a checkpoint with it."""

    at: float = 0.0
    """Time of the report on the rank's node, in seconds since the epoch."""

    survivor: int | None = None
    """The rank that has made it instead, because its own was lost; None if its own has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDigested(OfRank):
    """A rank has computed digests of its state at a report."""

    step: int
    digests: Mapping[str, str]
    """Name of a tensor, or of another part → its digest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactnessFound(OfRank):
    """A rank has checked whether virtual workers give the same bits at any number of workers."""

    why_not: str
    """Why they may not; empty if a check has passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavesOnRequest(OfRank):
    """A training function calls `checkpoint_requested()`: it makes a checkpoint on request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done(OfTraining):
    """A worker process's training has returned; it waits for the call to leave."""

    returned: Returned | None = field(default=None, repr=False)
    """The training function's return value; None if that was None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A rank has reported a failure."""

    attempt: int
    failure: Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Diverged:
    """A rank's report shows that training diverges; the rank waits to be killed."""

    attempt: int
    found: Rollback
    problem: str = ""
    """Why nothing can be left out after it; empty if something can, or needn't."""

    @property
    def failure(self) -> Failure:
        """The failure that ends the attempt."""
        message = f"training diverges: {self.found.reason}"
        return Failure(kind=FailureKind.DIVERGED, rank=self.found.rank, message=message)


@dataclass(frozen=True, slots=True, kw_only=True)
class OfEnd(OfRank):
    """The end of a worker process."""

    how: str
    """Description of its end, for people: "killed by SIGKILL", "exited with code 1"."""

    out_of_memory: bool = False
    """Whether the kernel's out-of-memory killer has ended it."""

    output: str = ""
    """The end of its standard error, or of all its output if that has one pipe."""

    since_s: float = 0.0
    """Seconds from its end until this event was sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Died(OfEnd):
    """A worker process has ended by itself, and what it staged still isn't stored; then `Exited`.

    Its part of a checkpoint may wait for rank 0's, and rank 0 for this rank.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Exited(OfEnd):
    """A worker process is gone, and everything that it staged is stored."""

    killed: bool
    """Whether the driver requested to kill it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentLost:
    """An agent is lost, with its worker process and its data."""

    rank: int
    reason: str
    kind: FailureKind = FailureKind.AGENT_LOST


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepsState(OfRank):
    """A worker process keeps its state after each step, for the case that another is lost."""

    size: int
    """Bytes of the whole state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepsNothing(OfRank):
    """A worker process can't keep its state: after a loss there is nobody to ask."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptRead(OfRank):
    """The small states of a rank, whose process may be gone."""

    states: tuple[KeptState, ...]
    is_alive: bool
    """Whether its process is there, and can be asked for the whole state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateUnwritten(OfRank):
    """A survivor has no clean state, or couldn't write it in time; or a copy can't be stored."""

    reason: str
    is_copy: bool = False
    """Whether it is about a copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyRefused(OfRank):
    """A rank can't make its part of a copy; it waits until all ranks are asked to drop theirs."""

    number: int
    """The copy's number; 0 if none was being made."""

    reason: str
    is_last: bool
    """Whether it makes no other copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopySent(OfRank):
    """A rank's copy lies on another host too, or can't be sent there."""

    number: int
    """The copy's number."""

    newest: int
    """The number of the rank's newest copy."""

    holder: int | None
    """The rank whose agent keeps it; None if it can't be sent."""

    reason: str = ""
    """Why it can't."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiesHeld(OfRank):
    """The copies of its part of the state that a rank has left; see `Copies`."""

    numbers: tuple[int, ...]


Event = (
    AgentsPlaced
    | PlacementFailed
    | DrainWanted
    | Drained
    | Offered
    | Joined
    | SavesOnRequest
    | ConditionMet
    | Done
    | Failed
    | Diverged
    | Died
    | Exited
    | AgentLost
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Started(OfRank):
    """A worker process was requested; its time limit to join the others begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus(OfRank):
    """The state of a worker process that has joined; sent when it changes noticeably."""

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
class Load(OfRank):
    """The load of a worker process in a window in which it made progress."""

    window: int
    """Number of the window since the ranks joined."""

    busy: float
    """Share of the window during which its main thread didn't wait for others, from 0 to 1."""

    cpu: float = 0.0
    """CPUs that all threads of the process used in the window, on average."""

    memory: int = 0
    """Resident bytes of the process at the end of the window."""

    gpus: tuple[GpuUse, ...] = ()
    """The use of each of its GPUs in the middle of the window; empty if it wasn't read."""


STACKS_WITHIN_S = 12.0
"""Seconds to wait for `Stacks`. An agent answers within ten seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stacks(OfRank):
    """The stacks of a worker process."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveTimedOut(OfRank):
    """A worker process was asked to leave, didn't, and has been killed."""

    after_s: float
    stacks: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Unkillable(OfRank):
    """A killed worker process hasn't ended in time; its agent stops waiting for it."""

    pid: int
    """Its process id; 0 if unknown."""

    after_s: float


HealthEvent = Started | WorkerStatus | Load | Stacks | LeaveTimedOut | Unkillable
