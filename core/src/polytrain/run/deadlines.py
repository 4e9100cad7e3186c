"""The deadlines of a run's driver: when it has to act although no event arrives. No clock."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto


class Deadline(Enum):
    """What may be late; each has at most one deadline."""

    PARTS = auto()
    """A rank's part of a checkpoint that others wait for: `CheckpointCoordinator.overdue`."""

    SURVIVORS = auto()
    """The answers of an attempt's survivors: `Survivors.overdue`."""

    RANKS = auto()
    """Ranks that start, join, or are asked for their stacks: `HealthMonitor.look`."""

    STACKS = auto()
    """Stacks that another process wants: `StacksAnswers.answer`."""

    PAUSE = auto()
    """The end of a pause after failed starts: `Controller._place`."""

    BUDGET = auto()
    """The run's time: see `StopRule.time_budget_s`."""


@dataclass(slots=True)
class Deadlines:
    """The next deadline of each."""

    _at: dict[Deadline, float] = field(default_factory=dict)

    def set(self, deadline: Deadline, at: float | None) -> None:
        """Set a deadline to a monotonic time, in place of its last one; None for none.

        A time that is over is found when all events that have arrived are handled.
        """
        if at is None:
            self._at.pop(deadline, None)
        else:
            self._at[deadline] = at

    def at(self, deadline: Deadline) -> float | None:
        """Return the monotonic time of a deadline; None without one."""
        return self._at.get(deadline)

    def passed(self, now: float) -> Iterator[Deadline]:
        """Remove and yield the deadlines that are over; none that is set meanwhile."""
        over = [deadline for deadline, at in self._at.items() if now >= at]
        for deadline in over:
            # What another one has led to may have moved it.
            if self._at.get(deadline, math.inf) <= now:
                del self._at[deadline]
                yield deadline

    def left_s(self, now: float) -> float | None:
        """Return the seconds until the next deadline; None without one."""
        return max(0.0, min(self._at.values()) - now) if self._at else None
