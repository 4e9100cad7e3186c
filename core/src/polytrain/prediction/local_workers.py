"""Workers on this machine, without Ray: processes that a zygote forks, or the calling process."""

from __future__ import annotations

import contextlib
import itertools
import pickle
from collections.abc import Iterator, Mapping, Sequence

from polytrain.prediction.parts import Unit
from polytrain.prediction.predictor import PredictedPart, PredictionTask, Predictor
from polytrain.prediction.scheduling import (
    Event,
    Lost,
    PickledTask,
    Predicted,
    Raised,
    RowsOf,
    WorkerReady,
    Workers,
)
from polytrain.workers.processes.pool import Ended, ProcessPool, Sent, forked_pool

_ENTRY = "polytrain.prediction.predictor"


class LocalWorkers(Workers):
    """Forked processes. None is left behind, even if this process is killed."""

    _pool: ProcessPool

    def __init__(
        self,
        task: PickledTask,
        *,
        count: int,
        modules: Sequence[str],
        environment: Mapping[str, str],
        gpus: Sequence[str],
        rows_of: RowsOf,
    ) -> None:
        """
        Args:
            task: the workers' pickled task.
            count: number of workers.
            modules: modules to import once for all workers.
            environment: variables of the processes, besides those of this one.
            gpus: a GPU for each worker, as CUDA_VISIBLE_DEVICES names it; none if they see all.
            rows_of: returns the rows that must be sent with a unit.
        """
        self._task, _ = task
        self._count = count
        self._modules = modules
        self._environment = environment
        self._gpus = gpus
        self._rows_of = rows_of
        self._numbers = itertools.count()
        self._processes: dict[int, int] = {}
        """Worker → number of its process."""

        self._workers: dict[int, int] = {}
        """Number of a process → its worker."""

        self._opened = contextlib.ExitStack()

    def __enter__(self) -> LocalWorkers:
        with contextlib.ExitStack() as stack:
            forked = forked_pool(_ENTRY, self._modules, self._environment)
            self._pool = stack.enter_context(forked)
            for worker in range(self._count):
                self.replace(worker)
            self._opened = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def assign(self, worker: int, unit: Unit) -> None:
        process, rows = self._processes[worker], self._rows_of(unit)
        count = None if rows is None else len(rows)
        self._pool.send(process, ["unit", pickle.dumps(unit), count])
        for stream in rows or ():
            self._pool.send(process, ["rows", stream])

    def replace(self, worker: int) -> None:
        number = self._processes[worker] = next(self._numbers)
        self._workers[number] = worker
        own = {"CUDA_VISIBLE_DEVICES": self._gpus[worker]} if self._gpus else {}
        self._pool.start(number, ["task", self._task, own])

    def next(self) -> Event:
        # No time limit: a part may take any time, and the end of a lost process is an event.
        match self._pool.next():
            case Sent(number=number, message=["ready"]):
                return WorkerReady(worker=self._workers[number])
            case Sent(number=number, message=["predicted", part]):
                return Predicted(worker=self._workers[number], part=pickle.loads(part))
            case Sent(message=["raised", error]):
                return Raised(error=pickle.loads(error))
            case Ended(number=number, how=how):
                return Lost(worker=self._workers.pop(number), reason=how)
            case other:
                raise AssertionError(f"{other} is no event of a worker")


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
