"""Decides how long a run waits for agents that have resources and are starting. Pure."""

from __future__ import annotations

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """How many workers a run that could do with fewer waits for, and why."""

    workers: int
    reason: str


def expected(*, up: int, starting: Starting, waited_s: float, limit_s: float) -> Expected:
    """Decide how many workers to begin with, or to grow to.

    Args:
        up: agents that have arrived.
        starting: those that are starting.
        waited_s: seconds for which the run has waited.
        limit_s: seconds for which it waits at most.
    """
    late = len(starting.hosts)
    if late == 0:
        return Expected(workers=up, reason=f"no others than {numbered(up, 'worker')} are starting")
    if waited_s < limit_s:
        return Expected(workers=up + late, reason=str(starting))
    reason = f"{late} of {up + late} have not started within {limit_s:g} s, on {starting.nodes}"
    return Expected(workers=up, reason=reason)
