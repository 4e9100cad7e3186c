"""Where a run stands.

What grows with the number of ranks is persistent: the next state shares it with this one, and an
event costs the same in a run of ten thousand workers.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from rpds import HashTrieMap, HashTrieSet, Queue

from polytrain.common.errors import Failure
from polytrain.common.events import DrainWanted
from polytrain.monitoring.hang_detector import AttemptStatus
from polytrain.policy.failure import FailedAttempt, FailurePolicy
from polytrain.policy.health import Loss
from polytrain_plugins import Offer


@dataclass(frozen=True, slots=True, kw_only=True)
class Placing:
    """Waiting for an agent for every rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathering:
    """Worker processes are starting; their offers come in."""

    offers: HashTrieMap[int, Offer] = field(default_factory=HashTrieMap)


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Everybody has the roster and trains; some ranks may be done."""

    done: HashTrieSet[int] = field(default_factory=HashTrieSet)


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """Every rank is done. Only the loss of an unstored checkpoint can still fail the run."""

    gone: HashTrieSet[int] = field(default_factory=HashTrieSet)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """All worker processes are being killed. Until they are gone more may come up."""

    failures: Queue[Failure] = field(default_factory=Queue)
    """What went wrong, in the order in which it was told; empty where the run itself ends it."""

    failed: HashTrieSet[int | None] = field(default_factory=HashTrieSet)
    """Ranks with a failure of their own: how their processes end says nothing more."""

    lasted_s: float = 0.0
    """Seconds that the attempt has lasted."""

    gone: HashTrieSet[int] = field(default_factory=HashTrieSet)
    was_dismissed: bool = False
    """Whether every rank was done before: a worker that ends by itself then does as told."""

    lost_agents: HashTrieSet[int] = field(default_factory=HashTrieSet)

    @property
    def is_planned(self) -> bool:
        """Whether the run itself ends the attempt."""
        return not self.failed

    def also(self, failure: Failure) -> Ending:
        """The same with one failure more."""
        return replace(
            self,
            failures=self.failures.enqueue(failure),
            failed=self.failed.insert(failure.rank),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Concluded:
    """The run is over, or this driver has stopped working on it."""

    succeeded: bool


Phase = Placing | Gathering | Training | Leaving | Ending | Concluded


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Everything that the machine remembers."""

    world_size: int
    """Ranks of the attempt that lives, or of the last one."""

    policy: FailurePolicy
    node_cooldown_s: float = 0.0
    """Seconds for which losses count against a node."""

    phase: Phase = field(default_factory=Placing)
    attempt: int = 0
    """The attempt that lives, or the next one to be launched while there is none."""

    attempts: tuple[FailedAttempt, ...] = ()
    """Those that have failed, the oldest first."""

    losses: tuple[Loss, ...] = ()
    """Workers that were lost on nodes."""

    nodes: tuple[str, ...] = ()
    """Where each rank is."""

    leaving_nodes: frozenset[str] = frozenset()
    """Nodes that are about to be taken away."""

    launches: int = 0
    """Attempts that were launched."""

    launched_at: float = 0.0

    committed: int = 0
    """Step of the newest checkpoint: what an attempt starts from."""

    steps: HashTrieMap[int, int] = field(default_factory=HashTrieMap)
    """Last step that each rank has reported that has joined this attempt."""

    has_reported: bool = False
    """Whether any rank of this attempt has reported a step."""

    saves: bool = True
    """Whether the training makes checkpoints, as far as is known: a stop waits for the next one."""

    drain: DrainWanted | None = None
    """Why the worker processes are to stop after their next checkpoint, if they are."""

    @property
    def status(self) -> AttemptStatus | None:
        """How far the ranks are, as the hang detector needs it; None unless they are at work."""
        match self.phase:
            case Gathering(offers=offers):
                offered: Collection[int] | None = offers
                done: HashTrieSet[int] = HashTrieSet()
            case Training(done=done):
                offered = None
            case _:
                return None
        return AttemptStatus(attempt=self.attempt, offered=offered, done=done, steps=self.steps)

    @property
    def restarts(self) -> int:
        """Attempts that were launched after the first, for whatever reason."""
        return max(0, self.launches - 1)
