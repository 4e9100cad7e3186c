"""Watches an attempt: requests the stacks of ranks that are late or hang, then decides. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from polytrain.config.configs import FailureConfig
from polytrain.errors import Failure, FailureKind
from polytrain.events.attempt import (
    STACKS_WITHIN_S,
    Done,
    HealthEvent,
    Joined,
    Stacks,
    Started,
    WorkerStatus,
)
from polytrain.policy.hangs import Hung, RankStatuses, Suspicious, have, judge
from polytrain.text.described import first_few

_SHOWN_HOSTS = 4
"""Hosts that a message names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptStatus:
    """The progress of a running attempt's ranks."""

    attempt: int
    offered: Collection[int] | None
    """Ranks that have made their offers; None once all have."""

    steps: Mapping[int, int]
    """Rank → its last reported step, for ranks that have joined."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpStacks:
    """Request the stacks of every worker process from its agent."""

    pausing: bool
    """Whether worker processes may be paused for that. A pause can make a system call fail;
    LightGBM's network doesn't survive it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarnUser:
    """Log a warning for the user."""

    reason: str
    stacks: Mapping[int, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class FailAttempt:
    """End the attempt."""

    failure: Failure
    stacks: Mapping[int, str]
    """The stacks for the journal; the failure has those that say something to the user."""


@dataclass(slots=True, kw_only=True)
class _StacksRequest:
    """A request for stacks that isn't answered yet."""

    about: Hung | Suspicious | Failure
    deadline: float
    stacks: dict[int, str] = field(default_factory=dict)

    @property
    def is_pausing(self) -> bool:
        return not isinstance(self.about, Suspicious)


@dataclass(slots=True, kw_only=True)
class HangDetector:
    """The state of one attempt's worker processes, and which warnings were logged. No clock.

    It takes health events and returns actions. Before a warning or a failure, it requests every
    rank's stacks, and waits for them as long as an agent may need.
    """

    config: FailureConfig
    attempt: int
    world_size: int
    hosts: Sequence[str] = ()
    _started: set[int] = field(default_factory=set)
    _joined: set[int] = field(default_factory=set)
    _rendezvous: float | None = None
    """The deadline for all ranks to start; once they have, the deadline to join."""

    _ranks: RankStatuses = field(init=False)
    _heard: dict[int, float] = field(default_factory=dict)
    """Rank → time at which its latest status arrived."""

    _request: _StacksRequest | None = None

    def __post_init__(self) -> None:
        self._ranks = RankStatuses(config=self.config, world_size=self.world_size)

    @property
    def deadline(self) -> float | None:
        """The time at which `look` may return an action without a new event."""
        return self._rendezvous if self._request is None else self._request.deadline

    @property
    def has_started(self) -> bool:
        """Whether every worker process has been requested."""
        return len(self._started) == self.world_size

    @property
    def may_harm(self) -> bool:
        """Whether ranks are being paused for their stacks."""
        return self._request is not None and self._request.is_pausing

    def launched(self, *, now: float) -> None:
        """Note that the attempt begins: agents load data and the starting checkpoint."""
        self._rendezvous = now + self.config.load_timeout_s

    def take(self, event: HealthEvent | Joined | Done, *, now: float) -> None:
        """Record an event. Events of other attempts are ignored."""
        if event.attempt != self.attempt:
            return
        match event:
            case Started(rank=rank):
                self._started.add(rank)
                if self.has_started and len(self._joined) < self.world_size:
                    self._rendezvous = now + self.config.rendezvous_timeout_s
            case Joined(rank=rank):
                self._joined.add(rank)
                if len(self._joined) == self.world_size:
                    self._rendezvous = None
            case WorkerStatus(rank=rank):
                self._heard[rank] = now
                self._ranks.take(event)
            case Done(rank=rank):
                self._ranks.left(rank)
            case Stacks(rank=rank, text=text) if self._request is not None:
                self._request.stacks[rank] = text
            case _:
                pass

    def look(
        self, status: AttemptStatus | None, *, now: float
    ) -> DumpStacks | WarnUser | FailAttempt | None:
        """Return the action to take now, each once."""
        if status is None or status.attempt != self.attempt:
            self._request = self._rendezvous = None
            return None
        if self._request is not None:
            return self._concluded(self._request, status, now)
        about = self._late(status, now) or judge(self._ranks, steps=status.steps)
        if about is None:
            return None
        self._request = _StacksRequest(about=about, deadline=now + STACKS_WITHIN_S)
        return DumpStacks(pausing=self._request.is_pausing)

    def _concluded(
        self, request: _StacksRequest, status: AttemptStatus, now: float
    ) -> WarnUser | FailAttempt | None:
        if len(request.stacks) < self.world_size and now < request.deadline:
            return None
        self._request = None
        about, stacks = request.about, dict(sorted(request.stacks.items()))
        since_s, late = 0.0, frozenset[int]()
        match about:
            case Failure(kind=kind, rank=rank, message=message, late=late):
                self._rendezvous = None
            case Hung(rank=rank, reason=message) if self._is_confirmed(about, status):
                kind, since_s = FailureKind.HANG, self._quiet_s(about.ranks, now)
            case _:
                self._ranks.warn(about.ranks)
                return WarnUser(reason=about.reason, stacks=stacks)
        # The failure's message already begins with the rank.
        message = message.removeprefix(f"rank {rank} ")
        # Stacks of ranks that wait for each other show the framework's wait alone.
        is_network = kind is FailureKind.STARTUP and status.offered is None and self._is_apart
        failure = Failure(
            kind=kind,
            rank=rank,
            message=message,
            stacks={} if is_network else stacks,
            since_s=since_s,
            late=late,
        )
        return FailAttempt(failure=failure, stacks=stacks)

    def _quiet_s(self, ranks: frozenset[int], now: float) -> float:
        """Return the seconds since any of these ranks made progress."""
        known = ((rank, self._ranks.inside.get(rank)) for rank in ranks)
        quiet = [now - self._heard[rank] + its.quiet_s for rank, its in known if its is not None]
        return min(quiet, default=0.0)

    def _is_confirmed(self, hung: Hung, status: AttemptStatus) -> bool:
        """Return whether ranks still hang: dumping stacks may resume a stopped process."""
        return hung.is_stop or isinstance(judge(self._ranks, steps=status.steps), Hung)

    def _late(self, status: AttemptStatus, now: float) -> Failure | None:
        if self._rendezvous is None or now < self._rendezvous:
            return None
        if not self.has_started:
            waiting = [rank for rank in range(self.world_size) if rank not in self._started]
            return Failure(
                kind=FailureKind.STARTUP,
                rank=waiting[0] if len(waiting) == 1 else None,
                late=frozenset(waiting),
                message=(
                    f"{have(waiting)} not loaded the data and the starting checkpoint within "
                    f"{self.config.load_timeout_s:g} s. Look whether the data and the storage can "
                    "be read from there, or raise FailureConfig(load_timeout_s=…)"
                ),
            )
        if status.offered is not None:
            what, there = "made an offer to the others", frozenset(status.offered)
        else:
            what, there = "joined the others", frozenset(self._joined)
        missing = [rank for rank in range(self.world_size) if rank not in there]
        limit = f"rendezvous_timeout_s={self.config.rendezvous_timeout_s:g}"
        hint = self._network_hint() if status.offered is None and self._is_apart else ""
        return Failure(
            kind=FailureKind.STARTUP,
            rank=missing[0] if len(missing) == 1 else None,
            # Once all have made their offers, they wait for each other.
            late=frozenset(missing if status.offered is not None else ()),
            message=f"{have(missing)} not {what} in time ({limit}){hint}",
        )

    @property
    def _is_apart(self) -> bool:
        """Whether the ranks are on several hosts."""
        return len(set(self.hosts)) > 1

    def _network_hint(self) -> str:
        """Name the hosts, and the command that finds which of them can't connect."""
        first: dict[str, int] = {}
        for rank, host in enumerate(self.hosts):
            first.setdefault(host, rank)
        places = [f"rank {rank} on {host}" for host, rank in first.items()]
        return (
            f": {first_few(places, _SHOWN_HOSTS, of='hosts')}. One of them probably can't connect "
            "to another, because of a firewall: `polytrain doctor --nodes all` tries them in both "
            "directions"
        )
