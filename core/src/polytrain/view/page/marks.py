"""What is marked on a run's timeline. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from polytrain.view.page.record import Happening


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


def marks_of(happenings: Iterable[Happening]) -> Iterator[Mark]:
    """Yield the marks of a run, in order."""
    workers: int | None = None
    is_first = True
    for each in happenings:
        if each.entry["event"] == "Launched":
            before, workers = workers, each.entry["world_size"]
            if before is not None and before != workers:
                text = f"{workers} workers instead of {before}"
                yield _mark(each, MarkKind.RESIZE, text)
        elif each.entry["event"] == "Opened":
            if not is_first:
                yield _mark(each, MarkKind.DRIVER, "a driver resumes the run")
            is_first = False
        else:
            yield from _of_one(each)


def _of_one(happening: Happening) -> Iterator[Mark]:
    entry = happening.entry
    match entry["event"]:
        case "Committed":
            text = f"{entry['checkpoint']}, step {entry['step']}"
            yield _mark(happening, MarkKind.CHECKPOINT, text)
        case "AttemptEnded" if entry["failure"] is None:
            yield _mark(happening, MarkKind.RESTART, entry["reason"])
        case "AttemptEnded":
            failure = entry["failure"]
            text = f"{failure['kind']}: {failure['message']}"
            yield _mark(happening, MarkKind.FAILURE, text, failure["rank"])
        case "Straggler":
            yield _mark(happening, MarkKind.STRAGGLER, entry["reason"], entry["rank"])
        case "StacksDumped":
            yield _mark(happening, MarkKind.STACKS, entry["reason"])
        case "ValidationEnded":
            text = f"{entry['checkpoint']}: {entry['status']}"
            yield _mark(happening, MarkKind.VALIDATION, text)


def _mark(happening: Happening, kind: MarkKind, text: str, rank: int | None = None) -> Mark:
    return Mark(kind=kind, at=happening.at, time=happening.entry["time"], rank=rank, text=text)
