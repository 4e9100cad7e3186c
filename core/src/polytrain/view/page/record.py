"""A run's history with what a restart has undone, and what is marked on its timeline. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from polytrain.errors import Failure
from polytrain.record.entries import (
    AttemptEnded,
    CheckpointCommitted,
    Entry,
    Launched,
    Opened,
    StacksDumped,
    StragglerFound,
    ValidationEnded,
)
from polytrain.record.reports import Reports
from polytrain.text.described import numbered
from polytrain.view.present import ShownHistory
from polytrain.view.timeline import Timeline


@dataclass(frozen=True, slots=True)
class TimedEntry:
    """An entry of the journal, and when it was written."""

    at: float
    """Seconds of the run's own time before it."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class Undone:
    """Reports that came after the checkpoint from which an attempt resumed."""

    launch: int
    """Number of launches before that attempt."""

    reports: Reports


@dataclass
class RunRecord(ShownHistory):
    """`read_as(RunRecord, journal)`: all that a page shows of a run's journal."""

    ledger: Timeline = field(default_factory=Timeline)
    timed: list[TimedEntry] = field(default_factory=list)
    """Every entry but reports."""

    undone: list[Undone] = field(default_factory=list)

    def take(self, entry: Entry) -> None:
        is_current = entry.token >= self._token
        if isinstance(entry, Launched) and is_current:
            lost = self.reports.after(entry.step)
            if lost:
                self.undone.append(Undone(self.launches, lost))
        super().take(entry)

    def take_event(self, entry: Entry) -> None:
        super().take_event(entry)
        self.timed.append(TimedEntry(self.ledger.wall_s, entry))


class MarkKind(StrEnum):
    """What a mark stands for."""

    DRIVER = "driver"
    """A later driver resumes the run."""

    CHECKPOINT = "checkpoint"
    FAILURE = "failure"
    RESTART = "restart"
    """A planned end of an attempt, such as one to resize."""

    RESIZE = "resize"
    """An attempt has a different number of workers than the one before."""

    STRAGGLER = "straggler"
    STACKS = "stacks"
    """Stacks were dumped: something hung."""

    VALIDATION = "validation"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """One of them."""

    kind: MarkKind
    at: float
    """Seconds of the run's own time before it."""

    time: float
    """In seconds since the epoch."""

    rank: int | None = None
    """None if it is about all ranks."""

    text: str


def marks_of(timed: Iterable[TimedEntry]) -> Iterator[Mark]:
    """Yield the marks of a run, in order."""
    workers: int | None = None
    is_first = True
    for each in timed:
        match each.entry:
            case Launched(world_size=world_size):
                before, workers = workers, world_size
                if before is not None and before != workers:
                    text = f"{numbered(workers, 'worker')} instead of {before}"
                    yield _mark(each, MarkKind.RESIZE, text)
            case Opened():
                if not is_first:
                    yield _mark(each, MarkKind.DRIVER, "a driver resumes the run")
                is_first = False
            case _:
                yield from _of_one(each)


def _of_one(timed: TimedEntry) -> Iterator[Mark]:
    match timed.entry:
        case CheckpointCommitted(checkpoint=checkpoint, step=step):
            yield _mark(timed, MarkKind.CHECKPOINT, f"{checkpoint}, step {step}")
        case AttemptEnded(failure=None, reason=reason):
            yield _mark(timed, MarkKind.RESTART, reason)
        case AttemptEnded(failure=Failure() as failure):
            text = f"{failure.kind.name}: {failure.message}"
            yield _mark(timed, MarkKind.FAILURE, text, failure.rank)
        case StragglerFound(reason=reason, rank=rank):
            yield _mark(timed, MarkKind.STRAGGLER, reason, rank)
        case StacksDumped(reason=reason):
            yield _mark(timed, MarkKind.STACKS, reason)
        case ValidationEnded(checkpoint=checkpoint, status=status):
            yield _mark(timed, MarkKind.VALIDATION, f"{checkpoint}: {status}")


def _mark(timed: TimedEntry, kind: MarkKind, text: str, rank: int | None = None) -> Mark:
    return Mark(kind=kind, at=timed.at, time=timed.entry.time, rank=rank, text=text)
