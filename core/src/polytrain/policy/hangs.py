"""Judges by the statuses of an attempt's ranks whether they hang. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from polytrain.config.configs import FailureConfig
from polytrain.events.attempt import WorkerStatus
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


@dataclass(slots=True, kw_only=True)
class RankStatuses:
    """The latest statuses of an attempt's ranks in the training function, and what they show.

    Each status is sorted when it comes: the driver's cost of one doesn't grow with the number of
    ranks.
    """

    config: FailureConfig
    world_size: int
    inside: dict[int, WorkerStatus] = field(default_factory=dict)
    """Rank → its latest status, for ranks that have sent one."""

    done: set[int] = field(default_factory=set)
    """Ranks that have left the training function."""

    quiet: set[int] = field(default_factory=set)
    stopped: set[int] = field(default_factory=set)
    idle: set[int] = field(default_factory=set)
    half_idle: set[int] = field(default_factory=set)
    """Ranks that are idle for half of the time after which they count as idle."""

    waiting: set[int] = field(default_factory=set)
    """Ranks that wait for storage or a data pipeline."""

    warned: set[int] = field(default_factory=set)
    unwarned: set[int] = field(default_factory=set)
    """Quiet or stopped ranks for which a warning was logged, and the others."""

    def take(self, its: WorkerStatus) -> None:
        """Take the latest status of a rank."""
        limit = self.config.hang_timeout_s
        if limit is None or its.rank in self.done:
            return
        self.inside[its.rank] = its
        is_quiet, is_stopped = its.quiet_s >= limit, its.stopped_s >= stop_limit_s(limit)
        if not is_quiet and not is_stopped:
            self.warned.discard(its.rank)
        for ranks, has in (
            (self.quiet, is_quiet),
            (self.stopped, is_stopped),
            (self.idle, its.idle_s >= limit),
            (self.half_idle, its.idle_s >= limit / 2),
            (self.waiting, its.stage.is_wait),
            (self.unwarned, (is_quiet or is_stopped) and its.rank not in self.warned),
        ):
            (ranks.add if has else ranks.discard)(its.rank)

    def left(self, rank: int) -> None:
        """Note that a rank has left the training function."""
        self.done.add(rank)
        self.inside.pop(rank, None)
        for ranks in (self.quiet, self.stopped, self.idle, self.half_idle, self.waiting):
            ranks.discard(rank)
        self.unwarned.discard(rank)

    def warn(self, ranks: AbstractSet[int]) -> None:
        """Note that a warning about these ranks is logged."""
        self.warned |= ranks
        self.unwarned -= ranks


def judge(ranks: RankStatuses, *, steps: Mapping[int, int]) -> Hung | Suspicious | None:
    """Judge the ranks of one attempt; None if there is nothing for which no warning was logged."""
    action, inside = ranks.config.hang_action, len(ranks.inside)
    if ranks.stopped and action != "warn":
        stopped = sorted(ranks.stopped)
        since = max(ranks.inside[rank].stopped_s for rank in stopped)
        reason = f"{have(stopped)} been stopped by a signal for {since:.3g} s"
        return Hung(rank=_only(stopped), reason=reason, ranks=frozenset(stopped), is_stop=True)
    # A wait for storage or a data pipeline has its own limit, and holds up all other ranks.
    if not ranks.waiting:
        if action == "kill" and ranks.quiet:
            return _killed(ranks, steps)
        all_known = inside + len(ranks.done) == ranks.world_size
        if action == "kill_if_idle" and all_known and len(ranks.half_idle) == inside:
            # If not all are idle yet, it will soon be known whether all ranks hang.
            is_any = inside and len(ranks.idle) == inside
            return _all_idle(ranks, steps) if is_any else None
    if not ranks.unwarned:
        return None
    named = sorted(ranks.quiet | ranks.stopped)
    return Suspicious(reason=_described(named, ranks, steps), ranks=frozenset(named))


def _all_idle(ranks: RankStatuses, steps: Mapping[int, int]) -> Hung:
    inside = sorted(ranks.inside)
    since = f"for {min(its.idle_s for its in ranks.inside.values()):.3g} s"
    if ranks.done:
        reason = f"{_left(ranks, steps)}, without progress or CPU time {since}"
        return Hung(rank=_only(sorted(ranks.done)), reason=reason, ranks=frozenset(inside))
    if len(inside) == 1:
        reason = f"{have(inside)} made no progress and spent no CPU time {since}"
    else:
        reason = f"no rank has made progress or spent CPU time {since}"
    return Hung(rank=_only(inside), reason=reason, ranks=frozenset(inside))


def _killed(ranks: RankStatuses, steps: Mapping[int, int]) -> Hung:
    # A rank that works keeps the idle ranks waiting.
    working = [rank for rank, its in ranks.inside.items() if not _is_idle(its)]
    rank = _only(working) if working else _only(sorted(ranks.done) or [*ranks.inside])
    reason = _described(sorted(ranks.quiet), ranks, steps)
    return Hung(rank=rank, reason=reason, ranks=frozenset(ranks.quiet))


def _described(named: Sequence[int], ranks: RankStatuses, steps: Mapping[int, int]) -> str:
    inside = ranks.inside
    if len(named) == 1:
        each = f"it {_doing(inside[named[0]])}"
    else:
        doing = [f"rank {rank} {_doing(inside[rank])}" for rank in named[:_NAMED_AT_MOST]]
        each = ", ".join([*doing, *(["…"] if len(named) > len(doing) else [])])
    if ranks.done and all(_is_idle(its) for its in inside.values()):
        each = f"{each}; {_left(ranks, steps)}"
    since = max(inside[rank].quiet_s for rank in named)
    return f"{have(named)} made no progress for {since:.3g} s ({each})"


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


def _left(ranks: RankStatuses, steps: Mapping[int, int]) -> str:
    gone, others = sorted(ranks.done), sorted(ranks.inside)
    last = {steps.get(rank, 0) for rank in gone}
    at = f" at step {last.pop()}" if len(last) == 1 else ""
    waits = "waits" if len(others) == 1 else "wait"
    return f"{_named(gone)} left the training function{at} while {_named(others)} {waits} in it"


def have(ranks: Sequence[int]) -> str:
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
