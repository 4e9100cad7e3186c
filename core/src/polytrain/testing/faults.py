"""Faults as data: what goes wrong, on which rank, where and when. `injection` makes them happen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from polytrain.testing.strikes import STRIKES, Kind

Point = Literal[
    "offering",
    "offered",
    "joining",
    "joined",
    "before_report",
    "saving",
    "after_report",
]
"""Where in a trainer's life: before and after it offers and joins; before it saves the checkpoint
of a step, when only half of that is written, and after the report of the step is told."""

_WITHOUT_STEP: frozenset[Point] = frozenset({"offering", "offered", "joining", "joined"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something that a trainer does to itself or to what it depends on."""

    rank: int
    at_step: int = 0
    """The step that is about to be reported, or has just been. Before training there is none."""

    kind: Kind = "sigkill"
    point: Point = "after_report"
    attempt: int | None = 0
    """Of the run's attempts, by all its drivers; None is every one of them."""

    def is_due(self, *, rank: int, step: int, attempt: int, point: Point) -> bool:
        """Whether this is the place and the time."""
        return (
            rank == self.rank
            and point == self.point
            and attempt == (attempt if self.attempt is None else self.attempt)
            and (point in _WITHOUT_STEP or step == self.at_step)
        )

    def strike(self, *, rank: int, step: int, attempt: int, point: Point = "after_report") -> None:
        """Let it happen, if this is the place and the time."""
        if self.is_due(rank=rank, step=step, attempt=attempt, point=point):
            STRIKES[self.kind](f"rank {rank}, step {step}, attempt {attempt}")


def kill(*, rank: int, at_step: int = 0, point: Point = "after_report") -> Fault:
    """SIGKILL of a rank, at the first attempt."""
    return Fault(rank=rank, at_step=at_step, point=point)
