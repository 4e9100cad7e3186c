"""Decides the number of workers: at the start, after a loss, and when there is more room. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from polytrain.text.first_few import first_few, numbered

STARTING_S = 60.0
"""Seconds for which an elastic run waits for agents that are starting, though it could begin or
grow without them. With each that comes later it is restarted; and a node on which nothing ever
starts must not hold it up."""

_NAMED_HOSTS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Starting:
    """The requested agents that have their resources, and whose processes are starting."""

    hosts: tuple[str, ...] = ()
    """The address of each one's node."""

    setup: str | None = None
    """Description of what Ray sets up for them first; None if it is nothing."""

    def __str__(self) -> str:
        if self.setup is not None:
            return f"Ray sets up {self.setup}"
        return f"Ray is starting processes on {self.nodes} (reserved)"

    @property
    def nodes(self) -> str:
        """The addresses of the nodes, each once; of many, the first."""
        return first_few(sorted(set(self.hosts)), _NAMED_HOSTS, of="nodes")


def expected(*, up: int, starting: Starting, waited_s: float, limit_s: float) -> WorkerCount:
    """Decide how many workers a run that could do with fewer waits for."""
    late = len(starting.hosts)
    if late == 0:
        return WorkerCount(
            workers=up, reason=f"no others than {numbered(up, 'worker')} are starting"
        )
    if waited_s < limit_s:
        return WorkerCount(workers=up + late, reason=str(starting))
    reason = f"{late} of {up + late} have not started within {limit_s:g} s, on {starting.nodes}"
    return WorkerCount(workers=up, reason=reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The maximum number of workers on a cluster, and why it isn't more."""

    workers: int
    reason: str


def worker_capacity(
    node_totals: Sequence[Mapping[str, float]], demand: Mapping[str, float]
) -> Capacity:
    """Count the workers that fit on the nodes if nothing else runs there."""
    needed = {name: amount for name, amount in demand.items() if amount > 0}
    workers = sum(
        min(
            (_units(totals.get(name, 0.0)) // _units(amount) for name, amount in needed.items()),
            default=0,
        )
        for totals in node_totals
    )
    one = " and ".join(f"{amount:g} {name}" for name, amount in needed.items())
    held = "; ".join(
        ", ".join(f"{totals.get(name, 0.0):g} {name}" for name in needed) for totals in node_totals
    )
    nodes = numbered(len(node_totals), "node")
    return Capacity(
        workers=workers, reason=f"each worker takes {one}; the cluster has {nodes} ({held})"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCount:
    """The number of workers of the next attempt, and the reason."""

    workers: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SizePolicy:
    """Decides the size of a run, between the user's least and most workers."""

    least: int
    most: int
    standby: int = 0
    """Number of agents to keep as spares."""

    def first(self, *, up: int, room: int) -> WorkerCount | None:
        """Return the size of the first attempt; None while agents are still starting.

        Args:
            room: number of workers that had resources when the run began.
        """
        wanted = min(self.most, max(self.least, room))
        if up < wanted:
            return None
        return WorkerCount(workers=wanted, reason=f"{numbered(wanted, 'worker')} ready")

    def after_loss(self, *, size: int, up: int) -> WorkerCount | None:
        """Return the size with which to continue at once; None if too few are left.

        Args:
            up: remaining agents, standbys included.
        """
        workers = min(size, up)
        if workers < self.least:
            return None
        if workers == size:
            return WorkerCount(workers=workers, reason="every lost worker has been replaced")
        return WorkerCount(workers=workers, reason=f"{numbered(workers, 'worker')} of {size} left")

    def after_place(self, *, size: int, up: int) -> WorkerCount | None:
        """Return the size of the attempt that is being placed; None if there are too few agents.

        Args:
            up: running agents, standbys included.
        """
        return self.growth(size=size, up=up) or self.after_loss(size=size, up=up)

    def growth(self, *, size: int, up: int) -> WorkerCount | None:
        """Return the size to grow to at the next checkpoint; None if the run can't grow.

        Args:
            up: running agents, standbys included.
        """
        workers = min(self.most, up - self.standby)
        if workers <= size:
            return None
        return WorkerCount(
            workers=workers, reason=f"there is room for {numbered(workers, 'worker')} now"
        )


def holds(totals: Mapping[str, float], demand: Mapping[str, float]) -> bool:
    """Return whether there are enough resources for one worker."""
    return worker_capacity([totals], demand).workers > 0


def _units(amount: float) -> int:
    """Convert an amount to ten-thousandths, in which Ray counts, without rounding errors."""
    return round(amount * 10_000)
