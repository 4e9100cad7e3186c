"""Watches over one attempt: whether its ranks meet, and whether they hang. Pure: no clock.

Signs come in, and what is to be done about them comes out. Before anything is said to be wrong,
every rank's stacks are asked for, and waited for as long as an agent needs for them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass, field

from polytrain.common.config import FailureConfig
from polytrain.common.errors import Failure, FailureKind
from polytrain.common.events import Joined
from polytrain.monitoring.hang_policy import Hung, Suspicious, have, judge
from polytrain.monitoring.health_events import HealthEvent, Stacks, Started, Vitals

_INQUIRY_S = 12.0
"""An agent has its answer within ten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptStatus:
    """How far the ranks of an attempt are that is neither ending nor done."""

    attempt: int
    offered: Collection[int] | None
    """Ranks that have made their offers; None once all have."""

    done: Set[int]
    steps: Mapping[int, int]
    """Rank → last step that it has reported, of ranks that have joined."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpStacks:
    """Ask every agent for its worker process's stacks."""

    pausing: bool
    """Whether workers may be paused for it. A system call of theirs may fail by that: LightGBM's
    network doesn't survive it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarnUser:
    """Tell the user."""

    reason: str
    stacks: Mapping[int, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class FailAttempt:
    """End the attempt."""

    failure: Failure


@dataclass(slots=True, kw_only=True)
class _Inquiry:
    """Stacks are on their way."""

    about: Hung | Suspicious | Failure
    deadline: float
    stacks: dict[int, str] = field(default_factory=dict)

    @property
    def is_pausing(self) -> bool:
        return not isinstance(self.about, Suspicious)


@dataclass(slots=True, kw_only=True)
class HangDetector:
    """What is known of the worker processes of one attempt, and what has been said about it."""

    config: FailureConfig
    attempt: int
    world_size: int
    _started: set[int] = field(default_factory=set)
    _joined: set[int] = field(default_factory=set)
    _rendezvous: float | None = None
    """When all must have met."""

    _vitals: dict[int, Vitals] = field(default_factory=dict)
    _heard: dict[int, float] = field(default_factory=dict)
    """When that was told."""

    _warned: set[int] = field(default_factory=set)
    """Ranks of whose quiet the user knows."""

    _inquiry: _Inquiry | None = None

    @property
    def deadline(self) -> float | None:
        """When `look` may have something to say though nothing has happened."""
        return self._rendezvous if self._inquiry is None else self._inquiry.deadline

    @property
    def has_started(self) -> bool:
        """Whether every worker process has been asked for."""
        return len(self._started) == self.world_size

    @property
    def may_harm(self) -> bool:
        """Whether ranks are being paused to see why they hang."""
        return self._inquiry is not None and self._inquiry.is_pausing

    def take(self, sign: HealthEvent | Joined, *, now: float) -> None:
        """Take note of something. Signs of other attempts don't count."""
        if sign.attempt != self.attempt:
            return
        match sign:
            case Started(rank=rank):
                self._started.add(rank)
                if self.has_started and len(self._joined) < self.world_size:
                    self._rendezvous = now + self.config.rendezvous_timeout_s
            case Joined(rank=rank):
                self._joined.add(rank)
                if len(self._joined) == self.world_size:
                    self._rendezvous = None
            case Vitals(rank=rank):
                self._vitals[rank], self._heard[rank] = sign, now
                if sign.quiet_s < (self.config.hang_timeout_s or 0.0):
                    self._warned.discard(rank)
            case Stacks(rank=rank, text=text) if self._inquiry is not None:
                self._inquiry.stacks[rank] = text
            case _:
                pass

    def look(
        self, status: AttemptStatus | None, *, now: float
    ) -> DumpStacks | WarnUser | FailAttempt | None:
        """Say what is to be done now; nothing again before something has happened."""
        if status is None or status.attempt != self.attempt:
            self._inquiry = self._rendezvous = None
            return None
        if self._inquiry is not None:
            return self._concluded(self._inquiry, status, now)
        about = self._late(status, now) or self._judged(status)
        if about is None:
            return None
        self._inquiry = _Inquiry(about=about, deadline=now + _INQUIRY_S)
        return DumpStacks(pausing=self._inquiry.is_pausing)

    def _concluded(
        self, inquiry: _Inquiry, status: AttemptStatus, now: float
    ) -> WarnUser | FailAttempt | None:
        if len(inquiry.stacks) < self.world_size and now < inquiry.deadline:
            return None
        self._inquiry = None
        about, stacks = inquiry.about, dict(sorted(inquiry.stacks.items()))
        since_s = 0.0
        match about:
            case Failure(kind=kind, rank=rank, message=message):
                self._rendezvous = None
            case Hung(rank=rank, reason=message) if self._is_confirmed(about, status):
                kind, since_s = FailureKind.HANG, self._quiet_s(about.ranks, now)
            case _:
                self._warned |= about.ranks
                return WarnUser(reason=about.reason, stacks=stacks)
        # A failure of one rank begins with its name anyway.
        message = message.removeprefix(f"rank {rank} ")
        return FailAttempt(
            failure=Failure(kind=kind, rank=rank, message=message, stacks=stacks, since_s=since_s)
        )

    def _quiet_s(self, ranks: frozenset[int], now: float) -> float:
        """Seconds for which none of these has made progress."""
        known = [rank for rank in ranks if rank in self._heard]
        quiet = [now - self._heard[rank] + self._vitals[rank].quiet_s for rank in known]
        return min(quiet, default=0.0)

    def _is_confirmed(self, hung: Hung, status: AttemptStatus) -> bool:
        """Whether nobody has gone on meanwhile. To be looked into may itself end a stop."""
        return hung.is_stop or isinstance(self._verdict(status), Hung)

    def _verdict(self, status: AttemptStatus) -> Hung | Suspicious | None:
        return judge(
            self._vitals,
            world_size=self.world_size,
            done=status.done,
            steps=status.steps,
            config=self.config,
        )

    def _judged(self, status: AttemptStatus) -> Hung | Suspicious | None:
        verdict = self._verdict(status)
        if isinstance(verdict, Suspicious) and verdict.ranks <= self._warned:
            return None
        return verdict

    def _late(self, status: AttemptStatus, now: float) -> Failure | None:
        if self._rendezvous is None or now < self._rendezvous:
            return None
        if status.offered is not None:
            what, there = "made an offer to the others", frozenset(status.offered)
        else:
            what, there = "joined the others", frozenset(self._joined)
        missing = [rank for rank in range(self.world_size) if rank not in there]
        limit = f"rendezvous_timeout_s={self.config.rendezvous_timeout_s:g}"
        return Failure(
            kind=FailureKind.STARTUP,
            rank=missing[0] if len(missing) == 1 else None,
            message=f"{have(missing)} not {what} in time ({limit})",
        )
