"""When a run's time was spent: the ledger, span by span; and what happened when. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

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
from polytrain.record.ledger import Ledger
from polytrain.text.described import numbered

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Time of a run that belongs to one account."""

    account: str
    start: float
    """Seconds of the run's own time before it. The time between two drivers doesn't count."""

    seconds: float
    time: float
    """When it began, in seconds since the epoch."""


@dataclass
class Timeline(Ledger):
    """A ledger that remembers when. The spans of an account add up to its seconds."""

    _spans: list[_OpenSpan] = field(default_factory=list, repr=False)
    _movable: int = field(default=0, repr=False)
    """The first span of this attempt: time moves between accounts from there on."""

    @property
    def spans(self) -> Sequence[Span]:
        """The spans, in order and without gaps."""
        found: list[Span] = []
        start = 0.0
        for each in self._spans:
            if each.seconds > 0:
                found.append(
                    Span(account=each.account, start=start, seconds=each.seconds, time=each.time)
                )
                start += each.seconds
        return tuple(found)

    def _begin(self, began: float) -> None:
        super()._begin(began)
        self._movable = len(self._spans)

    def _launched(self, step: int, world_size: int) -> None:
        super()._launched(step, world_size)
        self._movable = len(self._spans)

    def _book(self, now: float) -> None:
        self._add(now - self._now)
        super()._book(now)

    def _book_each(self, passed: npt.NDArray[np.float64]) -> None:
        self._add(float(passed.sum()))
        super()._book_each(passed)

    def _add(self, seconds: float) -> None:
        account = self._account
        if account is None or seconds <= 0:
            return
        is_same = len(self._spans) > self._movable and self._spans[-1].account == account
        if is_same:
            self._spans[-1].seconds += seconds
        else:
            self._spans.append(_OpenSpan(account, seconds, self._now))

    def _move_from(self, account: str, seconds: float, to: str) -> None:
        super()._move_from(account, seconds, to)
        # What is known late has happened last.
        for at in range(len(self._spans) - 1, self._movable - 1, -1):
            span = self._spans[at]
            if span.account != account:
                continue
            if span.seconds > seconds:
                span.seconds -= seconds
                late = _OpenSpan(to, seconds, span.time + span.seconds)
                self._spans.insert(at + 1, late)
                return
            span.account = to
            seconds -= span.seconds


@dataclass(slots=True)
class _OpenSpan:
    account: str
    seconds: float
    time: float


@dataclass(frozen=True, slots=True)
class TimedEntry:
    """An entry of the journal, and when it was written."""

    at: float
    """Seconds of the run's own time before it."""

    entry: Entry


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
        case ValidationEnded(checkpoint=checkpoint, status=status, reason=reason):
            text = ": ".join([checkpoint, status, *([reason] if reason else [])])
            yield _mark(timed, MarkKind.VALIDATION, text)


def _mark(timed: TimedEntry, kind: MarkKind, text: str, rank: int | None = None) -> Mark:
    return Mark(kind=kind, at=timed.at, time=timed.entry.time, rank=rank, text=text)
