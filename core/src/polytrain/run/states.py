"""The states of a run, the actions of its state machine, and the answer to one event. Pure.

Maps by rank are persistent: the next state shares them with this one, so the cost of an event
doesn't grow with the number of workers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rpds import HashTrieMap, HashTrieSet, Queue

from polytrain.errors import Failure
from polytrain.events.attempt import (
    ConditionMet,
    Died,
    Diverged,
    Done,
    Drained,
    DrainWanted,
    Event,
    Exited,
    Failed,
    Joined,
)
from polytrain.policy.failed_attempts import FailedAttempt
from polytrain.policy.failure import FailurePolicy
from polytrain.policy.hang_detector import AttemptStatus
from polytrain.policy.placement import Loss
from polytrain.record.entries import (
    DivergenceFound,
    DrainRequested,
    Entry,
    RankJoined,
    StopConditionMet,
    Transitioned,
)
from polytrain.workers.agents.calls import DrainAttempt, Kill, Leave, SendRoster
from polytrain_plugins import Offer, Stopped


@dataclass(frozen=True, slots=True, kw_only=True)
class Placing:
    """Waiting for an agent for every rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathering:
    """Worker processes start and send their offers."""

    offers: HashTrieMap[int, Offer] = field(default_factory=HashTrieMap)


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """All ranks have the roster and train; some may be done."""

    done: HashTrieSet[int] = field(default_factory=HashTrieSet)


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """Every rank is done. Only the loss of an unstored checkpoint can still fail the run."""

    gone: HashTrieSet[int] = field(default_factory=HashTrieSet)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """All worker processes are being killed. Until they are gone, more failures may arrive."""

    failures: Queue[Failure] = field(default_factory=Queue)
    """The failures, in order of arrival; empty at a planned end."""

    failed: HashTrieSet[int | None] = field(default_factory=HashTrieSet)
    """Ranks with a failure of their own: the end of their processes adds nothing."""

    lasted_s: float = 0.0
    """Duration of the attempt, in seconds."""

    gone: HashTrieSet[int] = field(default_factory=HashTrieSet)
    was_dismissed: bool = False
    """Whether every rank was already done: then the exit of a worker process isn't a failure."""

    lost_agents: HashTrieSet[int] = field(default_factory=HashTrieSet)

    diverged: Diverged | None = None
    """The divergence that counts: that with the earliest last good step."""

    @property
    def is_planned(self) -> bool:
        """Whether the end is planned."""
        return not self.failed

    def also(self, failure: Failure) -> Ending:
        """Return it with one more failure, unless that is known already."""
        if failure.rank in self.failed and failure in self.failures:
            return self
        return replace(
            self,
            failures=self.failures.enqueue(failure),
            failed=self.failed.insert(failure.rank),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Concluded:
    """The run has ended, or this driver has stopped working on it."""

    succeeded: bool


Phase = Placing | Gathering | Training | Leaving | Ending | Concluded


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The complete state of the machine."""

    world_size: int
    """Number of ranks of the current attempt, or of the last one."""

    policy: FailurePolicy
    phase: Phase = field(default_factory=Placing)
    attempt: int = 0
    """The current attempt; between attempts, the next one."""

    attempts: tuple[FailedAttempt, ...] = ()
    """Failed attempts, oldest first."""

    losses: tuple[Loss, ...] = ()
    """Losses of workers, with their nodes."""

    nodes: tuple[str, ...] = ()
    """The node of each rank."""

    trained_on: frozenset[str] = frozenset()
    """Nodes of the attempts that have reported a step, and have ended."""

    leaving_nodes: frozenset[str] = frozenset()
    """Draining nodes."""

    launches: int = 0
    """Number of launched attempts."""

    launched_at: float = 0.0

    joined_at: float = math.inf
    """Time at which the last rank joined this attempt; infinite if some haven't."""

    committed: int = 0
    """Step of the newest checkpoint, from which an attempt starts."""

    progress: int = 0
    """Step of the newest checkpoint that was reported: what a failed attempt has left is none."""

    start: int = 0
    """Step of the checkpoint that the attempt has started from."""

    rescued: int = 0
    """How many steps that is after `progress`."""

    steps: HashTrieMap[int, int] = field(default_factory=HashTrieMap)
    """Last reported step of each rank that has joined this attempt."""

    has_reported: bool = False
    """Whether any rank of this attempt has reported a step, or has left a state after one."""

    saves: bool = True
    """Whether the training is known to make checkpoints: a stop waits for the next one."""

    drain: DrainWanted | None = None
    """The requested drain, after which worker processes stop at their next checkpoint."""

    def is_last(self, rank: int) -> bool:
        """Whether this rank's process is the last of an attempt's training that isn't gone."""
        match self.phase:
            case Ending(gone=gone):
                return len(gone.insert(rank)) == self.world_size
            case Training():
                return self.world_size == 1
        return False

    @property
    def good_step(self) -> int | None:
        """The last step that every rank has reported: divergence goes back to no earlier one.

        A rank that hasn't reported yet counts as if it were at the newest checkpoint, because it
        may never report. None if nothing counts as divergence.
        """
        if self.policy.config.on_divergence is None:
            return None
        reported = [step for step in self.steps.values() if step > self.start]
        if len(reported) < self.world_size:
            reported.append(self.committed)
        return min(reported)

    @property
    def status(self) -> AttemptStatus | None:
        """The ranks' progress for the hang detector; None unless they work."""
        match self.phase:
            case Gathering(offers=offers):
                offered: Collection[int] | None = offers
            case Training():
                offered = None
            case _:
                return None
        return AttemptStatus(attempt=self.attempt, offered=offered, steps=self.steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class AcquireWorkers:
    """Acquire an agent for every rank of the next attempt."""

    avoid: Mapping[str, float] = field(default_factory=dict)
    """Nodes to avoid, if others can hold the workers → the time from which they may get some."""

    without: frozenset[int] = frozenset()
    """Ranks of the last attempt whose agents must be replaced."""

    pause_s: float = 0.0
    """Seconds to wait before."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """The outcome of one event."""

    state: State
    actions: tuple[Action, ...] = ()
    reason: str = ""
    """The reason, for the journal; empty if nothing changed."""


def entries_of(event: Event | None, transition: Transition) -> Iterator[Entry]:
    """Yield the journal entries of a transition; none if it has no reason.

    Args:
        event: the event; None for the beginning of the run.
        transition: the state machine's answer.
    """
    if isinstance(event, ConditionMet):
        yield StopConditionMet(attempt=event.attempt, stopped=event.stopped)
    if isinstance(event, Diverged):
        found = event.found
        yield DivergenceFound(
            attempt=found.attempt,
            rank=found.rank,
            step=found.step,
            good_step=found.good_step,
            reason=found.reason,
            skipped=found.skipped,
            only_discards=transition.state.policy.only_discards(event),
        )
    if not transition.reason:
        return
    drain = transition.state.drain
    its: dict[str, Any] = {
        "cause": "Begun" if event is None else type(event).__name__,
        "phase": type(transition.state.phase).__name__,
        "attempt": transition.state.attempt,
        "reason": transition.reason,
    }
    match event:
        case Joined():
            yield RankJoined(
                **its, rank=event.rank, rows=event.rows, device=event.device, node=event.node
            )
        # These have an entry of their own besides.
        case Diverged():
            yield Transitioned(**{**its, "cause": "Failed"})
        case DrainWanted(nodes=nodes) if drain is None or not nodes <= drain.nodes:
            # The run stays: it has no worker there, or no others can hold its workers.
            yield Transitioned(**{**its, "cause": "NodesLeave"})
        case DrainWanted() | ConditionMet():
            yield DrainRequested(**{**its, "cause": "DrainWanted"})
        case Done(rank=0) | Drained(rank=0):
            yield Transitioned(
                **its, stalled_s=round(event.stalled_s, 6), copied_s=round(event.copied_s, 6)
            )
        case Died(since_s=s) | Exited(since_s=s) | Failed(failure=Failure(since_s=s)):
            yield Transitioned(**its, since_s=round(s, 6))
        case _:
            yield Transitioned(**its)
