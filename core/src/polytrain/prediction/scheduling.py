"""Assigns units of work to ready workers, and again if a worker is lost."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from polytrain.errors import PredictionFailedError
from polytrain.prediction.parts import Unit
from polytrain.prediction.predictor import PredictedPart

PickledTask = tuple[bytes, list[Any]]
"""A `PredictionTask` pickled by `pickled_apart`."""

RowsOf = Callable[[Unit], Sequence[bytes] | None]
"""Returns the rows that must be sent with a unit, as streams of a few; None if its worker reads
them."""

MOST_LOSSES = 3
"""Workers that may be lost with the same rows: rows that kill a worker do so every time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReady:
    """A worker has loaded the model, or has predicted its unit."""

    worker: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """A worker has predicted a part of its unit."""

    worker: int
    part: PredictedPart


@dataclass(frozen=True, slots=True, kw_only=True)
class Raised:
    """The model, or its loading, raised an exception."""

    error: BaseException


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """A worker ended by itself."""

    worker: int
    reason: str


Event = WorkerReady | Predicted | Raised | Lost


class Workers(ABC):
    """Workers, numbered from 0. They live within this context."""

    @abstractmethod
    def assign(self, worker: int, unit: Unit) -> None:
        """Make a ready worker predict a unit."""

    @abstractmethod
    def replace(self, worker: int) -> None:
        """Start a worker in place of a lost one."""

    @abstractmethod
    def next(self) -> Event:
        """Wait for the next event."""


def predicted_parts(workers: Workers, work: Sequence[Unit]) -> Iterator[PredictedPart]:
    """Yield the parts of all units, in the order of their completion.

    Raises:
        PredictionFailedError: workers were lost repeatedly.
        BaseException: any exception of the model.
    """
    waiting = deque(work)
    given: dict[int, Unit] = {}
    idle: list[int] = []
    losses: Counter[int] = Counter()
    while waiting or given:
        event = workers.next()
        match event:
            case WorkerReady(worker=worker):
                given.pop(worker, None)
                idle.append(worker)
            case Predicted(worker=worker, part=part):
                remaining = tuple(p for p in given[worker] if p.number != part.number)
                given[worker] = remaining
                yield part
            case Raised(error=error):
                raise error
            case Lost(worker=worker) if worker in idle:
                # No rows wait, and those of a lost worker get another one.
                idle.remove(worker)
            case Lost(worker=worker, reason=reason):
                unit = given.pop(worker, ())
                # A worker without a unit was lost while it loaded the model.
                key = unit[0].number if unit else -1
                losses[key] += 1
                if losses[key] >= MOST_LOSSES:
                    raise PredictionFailedError(_told(unit, losses[key], reason))
                if unit:
                    waiting.appendleft(unit)
                workers.replace(worker)
        while idle and waiting:
            worker = idle.pop()
            given[worker] = waiting.popleft()
            workers.assign(worker, given[worker])


def _told(unit: Unit, losses: int, reason: str) -> str:
    during = (
        f"predicted rows {unit[0].rows.start} to {unit[-1].rows.stop - 1}"
        if unit
        else "loaded the model"
    )
    return (
        f"{losses} workers were lost while they {during}; the last one {reason}. If they had too "
        "little memory, pass fewer num_workers or a smaller batch_size. With the same output, "
        "another call resumes after the files that are finished."
    )
