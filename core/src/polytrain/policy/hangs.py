"""Decides whether ranks hang, and whether that ends the attempt. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from polytrain.config.configs import FailureConfig
from polytrain.errors import Failure, FailureKind
from polytrain.events.attempt import Done, HealthEvent, Joined, Stacks, Started, WorkerStatus
from polytrain.text.described import first_few

_NAMED_AT_MOST = 16
"""Ranks that a sentence names; of more, the first."""

_MAX_STOP_S = 10.0
"""Maximum seconds that a signal may stop a worker process; an accidental stop is shorter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hung:
    """The attempt has to end."""

    rank: int | None
    """The rank that causes the hang; None if unknown."""

    reason: str
    ranks: frozenset[int]
    """Ranks without progress."""

    is_stop: bool = False
    """Whether a signal has stopped them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspicious:
    """The user gets a warning."""

    reason: str
    ranks: frozenset[int]
    """Ranks without progress."""


def stop_limit_s(timeout_s: float) -> float:
    """Return the maximum seconds that a signal may stop a process."""
    return min(_MAX_STOP_S, timeout_s)


def judge(
    statuses: Mapping[int, WorkerStatus],
    *,
    world_size: int,
    done: AbstractSet[int],
    steps: Mapping[int, int],
    config: FailureConfig,
) -> Hung | Suspicious | None:
    """Judge the ranks of one attempt.

    Args:
        statuses: rank → its latest status, for ranks that have sent one.
        done: ranks that have left the training function.
    """
    limit = config.hang_timeout_s
    if limit is None:
        return None
    inside = {rank: statuses[rank] for rank in sorted(statuses.keys() - done)}
    stopped = [rank for rank, its in inside.items() if its.stopped_s >= stop_limit_s(limit)]
    quiet = [rank for rank, its in inside.items() if its.quiet_s >= limit]
    idle = [rank for rank, its in inside.items() if its.idle_s >= limit]
    # A wait for storage or a data pipeline has its own limit, and holds up all other ranks.
    waits = any(its.stage.is_wait for its in inside.values())
    all_known = len(inside) + len(done) == world_size
    if stopped and config.hang_action != "warn":
        since = max(inside[rank].stopped_s for rank in stopped)
        reason = f"{_have(stopped)} been stopped by a signal for {since:.3g} s"
        return Hung(rank=_only(stopped), reason=reason, ranks=frozenset(stopped), is_stop=True)
    if config.hang_action == "kill" and quiet and not waits:
        return _killed(inside, quiet, done, steps)
    if config.hang_action == "kill_if_idle" and all_known and not waits:
        if idle and len(idle) == len(inside):
            return _all_idle(inside, done, steps)
        if all(its.idle_s >= limit / 2 for its in inside.values()):
            # Don't warn yet: it will soon be known whether all ranks hang.
            return None
    if not quiet and not stopped:
        return None
    named = sorted({*quiet, *stopped})
    return Suspicious(reason=_described(named, inside, done, steps), ranks=frozenset(named))


def _all_idle(
    inside: Mapping[int, WorkerStatus], done: AbstractSet[int], steps: Mapping[int, int]
) -> Hung:
    ranks = list(inside)
    since = f"for {min(its.idle_s for its in inside.values()):.3g} s"
    if done:
        reason = f"{_left(done, ranks, steps)}, without progress or CPU time {since}"
        return Hung(rank=_only(sorted(done)), reason=reason, ranks=frozenset(ranks))
    if len(ranks) == 1:
        reason = f"{_have(ranks)} made no progress and spent no CPU time {since}"
    else:
        reason = f"no rank has made progress or spent CPU time {since}"
    return Hung(rank=_only(ranks), reason=reason, ranks=frozenset(ranks))


def _killed(
    inside: Mapping[int, WorkerStatus],
    quiet: Sequence[int],
    done: AbstractSet[int],
    steps: Mapping[int, int],
) -> Hung:
    # A rank that works keeps the idle ranks waiting.
    working = [rank for rank in inside if not _is_idle(inside[rank])]
    rank = _only(working) if working else _only(sorted(done) or list(inside))
    reason = _described(quiet, inside, done, steps)
    return Hung(rank=rank, reason=reason, ranks=frozenset(quiet))


def _described(
    ranks: Sequence[int],
    inside: Mapping[int, WorkerStatus],
    done: AbstractSet[int],
    steps: Mapping[int, int],
) -> str:
    if len(ranks) == 1:
        each = f"it {_doing(inside[ranks[0]])}"
    else:
        doing = [f"rank {rank} {_doing(inside[rank])}" for rank in ranks[:_NAMED_AT_MOST]]
        each = ", ".join([*doing, *(["…"] if len(ranks) > len(doing) else [])])
    if done and all(_is_idle(its) for its in inside.values()):
        each = f"{each}; {_left(done, list(inside), steps)}"
    since = max(inside[rank].quiet_s for rank in ranks)
    return f"{_have(ranks)} made no progress for {since:.3g} s ({each})"


def _doing(its: WorkerStatus) -> str:
    if its.stopped_s:
        return "is stopped by a signal"
    if its.stage.is_wait:
        return f"is {its.stage}"
    if _is_idle(its):
        return "waits"
    return f"works: {its.cpu_s:.3g} s of CPU time"


def _is_idle(its: WorkerStatus) -> bool:
    return its.idle_s >= its.quiet_s / 2


def _left(done: Collection[int], others: Sequence[int], steps: Mapping[int, int]) -> str:
    gone = sorted(done)
    last = {steps.get(rank, 0) for rank in gone}
    at = f" at step {last.pop()}" if len(last) == 1 else ""
    waits = "waits" if len(others) == 1 else "wait"
    return f"{_named(gone)} left the training function{at} while {_named(others)} {waits} in it"


def _have(ranks: Sequence[int]) -> str:
    """Return ranks as the subject of a sentence: "rank 0 has", "ranks 0, 1 and 2 have"."""
    return f"{_named(ranks)} {'has' if len(ranks) == 1 else 'have'}"


def _named(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > _NAMED_AT_MOST:
        return f"ranks {first_few([*map(str, ranks)], _NAMED_AT_MOST)}"
    *others, last = map(str, ranks)
    return f"ranks {', '.join(others)} and {last}"


def _only(ranks: Sequence[int]) -> int | None:
    return ranks[0] if len(ranks) == 1 else None


_SHOWN_HOSTS = 4
"""Hosts that a message names."""

_INQUIRY_S = 12.0
"""Seconds to wait for stacks. An agent answers within ten seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptStatus:
    """The progress of a running attempt's ranks."""

    attempt: int
    offered: Collection[int] | None
    """Ranks that have made their offers; None once all have."""

    done: Set[int]
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
class _Census:
    """Counts of the ranks in the training function, by what `judge` asks of them.

    They say after each status, at a cost that doesn't grow with the number of ranks, whether it is
    worth looking at every rank.
    """

    config: FailureConfig
    quiet: set[int] = field(default_factory=set)
    stopped: set[int] = field(default_factory=set)
    idle: set[int] = field(default_factory=set)
    half_idle: set[int] = field(default_factory=set)
    """Ranks that are idle for half of the time after which they count as idle."""

    waiting: set[int] = field(default_factory=set)
    unwarned: set[int] = field(default_factory=set)
    """Quiet or stopped ranks for which no warning was logged."""

    def take(self, its: WorkerStatus, *, is_warned: bool) -> None:
        """Take the latest status of a rank."""
        limit = self.config.hang_timeout_s
        if limit is None:
            return
        is_quiet, is_stopped = its.quiet_s >= limit, its.stopped_s >= stop_limit_s(limit)
        for ranks, has in (
            (self.quiet, is_quiet),
            (self.stopped, is_stopped),
            (self.idle, its.idle_s >= limit),
            (self.half_idle, its.idle_s >= limit / 2),
            (self.waiting, its.stage.is_wait),
            (self.unwarned, (is_quiet or is_stopped) and not is_warned),
        ):
            (ranks.add if has else ranks.discard)(its.rank)

    def forget(self, rank: int) -> None:
        """Take a rank out: it has left the training function."""
        for ranks in (
            *(self.quiet, self.stopped, self.idle),
            *(self.half_idle, self.waiting, self.unwarned),
        ):
            ranks.discard(rank)

    def may_hang(self, *, inside: int, all_known: bool) -> bool:
        """Return whether `judge` may find something for which no warning was logged.

        Args:
            inside: number of ranks in the training function.
            all_known: whether all of them have sent a status.
        """
        action = self.config.hang_action
        if self.stopped and action != "warn":
            return True
        if not self.waiting:
            if action == "kill" and self.quiet:
                return True
            if action == "kill_if_idle" and all_known and len(self.half_idle) == inside:
                return bool(self.idle) and len(self.idle) == inside
        return bool(self.unwarned)


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

    _statuses: dict[int, WorkerStatus] = field(default_factory=dict)
    """Rank → its latest status, for ranks in the training function."""

    _done: set[int] = field(default_factory=set)
    _census: _Census = field(init=False)
    _heard: dict[int, float] = field(default_factory=dict)
    """Rank → time at which its latest status arrived."""

    _warned: set[int] = field(default_factory=set)
    """Ranks without progress for which a warning was logged."""

    _request: _StacksRequest | None = None

    def __post_init__(self) -> None:
        self._census = _Census(config=self.config)

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
            case WorkerStatus(rank=rank) if rank not in self._done:
                self._statuses[rank], self._heard[rank] = event, now
                if event.quiet_s < (self.config.hang_timeout_s or 0.0):
                    self._warned.discard(rank)
                self._census.take(event, is_warned=rank in self._warned)
            case Done(rank=rank):
                self._done.add(rank)
                self._statuses.pop(rank, None)
                self._census.forget(rank)
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
        about = self._late(status, now) or self._judged(status)
        if about is None:
            return None
        self._request = _StacksRequest(about=about, deadline=now + _INQUIRY_S)
        return DumpStacks(pausing=self._request.is_pausing)

    def _concluded(
        self, request: _StacksRequest, status: AttemptStatus, now: float
    ) -> WarnUser | FailAttempt | None:
        if len(request.stacks) < self.world_size and now < request.deadline:
            return None
        self._request = None
        about, stacks = request.about, dict(sorted(request.stacks.items()))
        since_s = 0.0
        match about:
            case Failure(kind=kind, rank=rank, message=message):
                self._rendezvous = None
            case Hung(rank=rank, reason=message) if self._is_confirmed(about, status):
                kind, since_s = FailureKind.HANG, self._quiet_s(about.ranks, now)
            case _:
                self._warned |= about.ranks
                self._census.unwarned -= about.ranks
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
        )
        return FailAttempt(failure=failure, stacks=stacks)

    def _quiet_s(self, ranks: frozenset[int], now: float) -> float:
        """Return the seconds since any of these ranks made progress."""
        known = [rank for rank in ranks if rank in self._statuses]
        quiet = [now - self._heard[rank] + self._statuses[rank].quiet_s for rank in known]
        return min(quiet, default=0.0)

    def _is_confirmed(self, hung: Hung, status: AttemptStatus) -> bool:
        """Return whether ranks still hang: dumping stacks may resume a stopped process."""
        return hung.is_stop or isinstance(self._verdict(status), Hung)

    def _verdict(self, status: AttemptStatus) -> Hung | Suspicious | None:
        return judge(
            self._statuses,
            world_size=self.world_size,
            done=status.done,
            steps=status.steps,
            config=self.config,
        )

    def _judged(self, status: AttemptStatus) -> Hung | Suspicious | None:
        all_known = len(self._statuses) + len(self._done) == self.world_size
        if not self._census.may_hang(inside=len(self._statuses), all_known=all_known):
            return None
        verdict = self._verdict(status)
        if isinstance(verdict, Suspicious) and verdict.ranks <= self._warned:
            return None
        return verdict

    def _late(self, status: AttemptStatus, now: float) -> Failure | None:
        if self._rendezvous is None or now < self._rendezvous:
            return None
        if not self.has_started:
            waiting = [rank for rank in range(self.world_size) if rank not in self._started]
            return Failure(
                kind=FailureKind.STARTUP,
                rank=waiting[0] if len(waiting) == 1 else None,
                message=(
                    f"{_have(waiting)} not loaded the data and the starting checkpoint within "
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
            message=f"{_have(missing)} not {what} in time ({limit}){hint}",
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
