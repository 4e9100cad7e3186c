"""Which worker predicts what, and what happens when workers are lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from polytrain import PredictionFailedError
from polytrain.prediction.parts import Unit, divided
from polytrain.prediction.predictor import PredictedPart
from polytrain.prediction.scheduling import (
    Event,
    Lost,
    Predicted,
    Raised,
    WorkerReady,
    Workers,
    predicted_parts,
)

PARTS = divided(60, 10)
UNITS: list[Unit] = [(PARTS[0],), (PARTS[1], PARTS[2]), (PARTS[3],), (PARTS[4], PARTS[5])]


class Played(Workers):
    """Workers that take turns; what becomes of a part is up to a function."""

    def __init__(self, count: int, fate: Callable[[int, int], Event | None]) -> None:
        """
        Args:
            count: number of workers.
            fate: of a worker and a part: None to predict it.
        """
        self._fate = fate
        self._events: list[Event] = [WorkerReady(worker=worker) for worker in range(count)]
        self.given: list[tuple[int, list[int]]] = []
        self.replaced: list[int] = []

    def assign(self, worker: int, unit: Unit) -> None:
        self.given.append((worker, [part.number for part in unit]))
        for part in unit:
            event = self._fate(worker, part.number)
            done = PredictedPart(number=part.number, predictions=None)
            self._events.append(event or Predicted(worker=worker, part=done))
            if event is not None:
                return
        self._events.append(WorkerReady(worker=worker))

    def replace(self, worker: int) -> None:
        self.replaced.append(worker)
        self._events.append(WorkerReady(worker=worker))

    def next(self) -> Event:
        return self._events.pop(0)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_every_part_is_predicted_once(count: int) -> None:
    workers = Played(count, lambda worker, part: None)
    numbers = [part.number for part in predicted_parts(workers, UNITS)]
    assert sorted(numbers) == [0, 1, 2, 3, 4, 5]
    assert {worker for worker, _ in workers.given} == set(range(count))


def test_a_lost_workers_unit_is_resumed_after_what_it_had_predicted() -> None:
    lost = []

    def fate(worker: int, part: int) -> Event | None:
        if part == 2 and not lost:
            lost.append(worker)
            return Lost(worker=worker, reason="killed by SIGKILL")
        return None

    workers = Played(1, fate)
    assert [part.number for part in predicted_parts(workers, UNITS)] == [0, 1, 2, 3, 4, 5]
    assert workers.given == [(0, [0]), (0, [1, 2]), (0, [2]), (0, [3]), (0, [4, 5])]
    assert workers.replaced == [0]


def test_a_worker_that_is_lost_while_it_has_nothing_to_do_gets_no_rows() -> None:
    fates: list[Event] = [Lost(worker=0, reason="killed by SIGKILL")]
    workers = Played(2, lambda worker, part: fates.pop() if fates else None)
    workers._events.append(Lost(worker=1, reason="killed by SIGKILL"))
    assert [part.number for part in predicted_parts(workers, UNITS[:1])] == [0]
    assert workers.replaced == [0]


def test_rows_that_kill_every_worker_end_it() -> None:
    workers = Played(2, lambda worker, part: Lost(worker=worker, reason="killed by SIGKILL"))
    with pytest.raises(PredictionFailedError, match=r"3 workers were lost .*rows 0 to 9.*SIGKILL"):
        [*predicted_parts(workers, UNITS[:1])]


def test_a_model_that_kills_every_worker_ends_it() -> None:
    workers = Played(0, lambda worker, part: None)
    workers._events = [Lost(worker=0, reason="exited with code 1")] * 3
    with pytest.raises(PredictionFailedError, match="while they loaded the model"):
        [*predicted_parts(workers, UNITS)]


def test_what_the_model_raises_is_raised() -> None:
    workers = Played(2, lambda worker, part: Raised(error=KeyError("x")) if part == 3 else None)
    with pytest.raises(KeyError):
        [*predicted_parts(workers, UNITS)]
