"""Decides whether ranks hang, and whether that ends the attempt."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from polytrain.config.configs import FailureConfig
from polytrain.events.health import WorkerStatus

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
        world_size: number of ranks.
        done: ranks that have left the training function.
        steps: the last step that each rank has reported.
        config: the user's configuration.
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
        reason = f"{have(stopped)} been stopped by a signal for {since:.3g} s"
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
        reason = f"{have(ranks)} made no progress and spent no CPU time {since}"
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
        each = ", ".join(f"rank {rank} {_doing(inside[rank])}" for rank in ranks)
    if done and all(_is_idle(its) for its in inside.values()):
        each = f"{each}; {_left(done, list(inside), steps)}"
    since = max(inside[rank].quiet_s for rank in ranks)
    return f"{have(ranks)} made no progress for {since:.3g} s ({each})"


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


def have(ranks: Sequence[int]) -> str:
    """Return ranks as the subject of a sentence: "rank 0 has", "ranks 0, 1 and 2 have"."""
    return f"{_named(ranks)} {'has' if len(ranks) == 1 else 'have'}"


def _named(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    *others, last = map(str, ranks)
    return f"ranks {', '.join(others)} and {last}"


def _only(ranks: Sequence[int]) -> int | None:
    return ranks[0] if len(ranks) == 1 else None
