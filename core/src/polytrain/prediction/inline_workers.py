"""Uses the calling process as the only worker."""

from __future__ import annotations

from collections.abc import Iterator

from polytrain.prediction.parts import Unit
from polytrain.prediction.predictor import PredictedPart, PredictionTask, Predictor
from polytrain.prediction.scheduling import Event, Predicted, WorkerReady, Workers


class InlineWorkers(Workers):
    """One worker, which predicts inside `next`. Exceptions are the model's own."""

    def __init__(self, task: PredictionTask) -> None:
        self._task = task
        self._predictor: Predictor | None = None
        self._parts: Iterator[PredictedPart] = iter(())

    def assign(self, worker: int, unit: Unit) -> None:
        assert self._predictor is not None
        self._parts = self._predictor.predicted(unit)

    def replace(self, worker: int) -> None:
        raise AssertionError("the calling process can't be lost")

    def next(self) -> Event:
        if self._predictor is None:
            self._predictor = Predictor(self._task)
            return WorkerReady(worker=0)
        part = next(self._parts, None)
        return WorkerReady(worker=0) if part is None else Predicted(worker=0, part=part)
