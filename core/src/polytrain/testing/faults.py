"""Faults as data: what goes wrong, on which rank, where and when. `injection` makes them happen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from polytrain.testing.fault_actions import FAULT_ACTIONS, Kind

Point = Literal[
    "offering",
    "offered",
    "joining",
    "joined",
    "before_report",
    "saving",
    "after_report",
]
"""A point in a worker process's life: before and after it offers and joins; before it reports a
step, when half of the step's checkpoint is written, and after the report."""

_WITHOUT_STEP: frozenset[Point] = frozenset({"offering", "offered", "joining", "joined"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something that a worker process does to itself or to something that it depends on."""

    rank: int
    at_step: int = 0
    """The step that is about to be reported, or was just reported. Unused before training."""

    kind: Kind = "sigkill"
    point: Point = "after_report"
    attempt: int | None = 0
    """Number of the attempt, counted over all drivers; None is every attempt."""

    def is_due(self, *, rank: int, step: int, attempt: int, point: Point) -> bool:
        """Whether the fault is due here."""
        return (
            rank == self.rank
            and point == self.point
            and attempt == (attempt if self.attempt is None else self.attempt)
            and (point in _WITHOUT_STEP or step == self.at_step)
        )

    def inject(self, *, rank: int, step: int, attempt: int, point: Point = "after_report") -> None:
        """Inject the fault, if it is due here."""
        if self.is_due(rank=rank, step=step, attempt=attempt, point=point):
            FAULT_ACTIONS[self.kind](f"rank {rank}, step {step}, attempt {attempt}")


def kill(*, rank: int, at_step: int = 0, point: Point = "after_report") -> Fault:
    """SIGKILL of a rank, at the first attempt."""
    return Fault(rank=rank, at_step=at_step, point=point)
