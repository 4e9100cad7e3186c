"""Workers on a Ray cluster: actors with a CPU or a GPU each."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from polytrain.functions.pickling import note_unreadable, unpickled
from polytrain.prediction.parts import Unit
from polytrain.prediction.predictor import PredictedPart, Predictor
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
from polytrain.ray_api.state import free_resources, living_nodes, with_placement

logger = logging.getLogger(__name__)

REFERENCES = (ray.ObjectRef,)
"""Types of references that only Ray can send: otherwise a process couldn't resolve them."""

_TOLD_AFTER_S = 10.0
"""Seconds without a worker after which a message names the missing resources."""


def free_workers(*, use_gpu: bool) -> int:
    """Return the number of workers for which the cluster has room now, at least 1."""
    return max(1, int(free_resources().get("GPU" if use_gpu else "CPU", 0)))


def has_nodes() -> bool:
    """Return whether there are other nodes, which may lack this node's files."""
    return len(living_nodes()) > 1


class _Worker:
    """The actor of a worker."""

    def __init__(self, task: bytes, references: list[Any]) -> None:
        self._task = task
        self._references = references
        self._predictor: Predictor | None = None
        self._parts: Iterator[PredictedPart] = iter(())

    def load(self) -> None:
        """Load the model."""
        try:
            task = unpickled(self._task, self._references)
        except Exception as error:
            host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
            note_unreadable(error, "The function that loads the model or predicts", host)
            raise
        self._predictor = Predictor(task)

    def start(self, unit: Unit, rows: Sequence[bytes] | None) -> PredictedPart | None:
        """Predict the first part of a unit."""
        assert self._predictor is not None
        self._parts = self._predictor.predicted(unit, rows)
        return self.next()

    def next(self) -> PredictedPart | None:
        """Predict the next part of the unit; None if there is none."""
        return next(self._parts, None)


class RayWorkers(Workers):
    """Actors, each with one pending call: to load the model, or to predict a part."""

    def __init__(
        self,
        task: PickledTask,
        *,
        count: int,
        use_gpu: bool,
        rows_of: RowsOf,
    ) -> None:
        """
        Args:
            task: the workers' pickled task, with `REFERENCES` apart.
            count: number of workers.
            use_gpu: whether each worker gets a GPU.
            rows_of: returns the rows that must be sent with a unit.
        """
        self._count = count
        self._demand = "1 CPU and 1 GPU" if use_gpu else "1 CPU"
        options = with_placement({"num_cpus": 1, "num_gpus": int(use_gpu)})
        self._actor = ray.remote(**options)(_Worker)
        pickled, self._references = task
        self._task = ray.put(pickled)
        self._rows_of = rows_of
        self._actors: dict[int, Any] = {}
        self._calls: dict[Any, int] = {}
        """Reference of a pending call → its worker."""

        self._loading: set[int] = set()
        self._has_started = False

    def __enter__(self) -> RayWorkers:
        for worker in range(self._count):
            self.replace(worker)
        return self

    def __exit__(self, *_: object) -> None:
        for actor in self._actors.values():
            ray.kill(actor)

    def assign(self, worker: int, unit: Unit) -> None:
        call = self._actors[worker].start.remote(unit, self._rows_of(unit))
        self._calls[call] = worker

    def replace(self, worker: int) -> None:
        self._actors[worker] = self._actor.remote(self._task, self._references)
        self._loading.add(worker)
        self._calls[self._actors[worker].load.remote()] = worker

    def next(self) -> Event:
        call = self._finished_call()
        worker = self._calls.pop(call)
        try:
            part = ray.get(call)
        except RayTaskError as error:
            # Pass on the framework's own exception, so that it can be caught by its type.
            return Raised(error=error.cause)
        except RayActorError as error:
            return Lost(worker=worker, reason=f"ended: {error}")
        self._has_started = True
        if worker in self._loading or part is None:
            self._loading.discard(worker)
            return WorkerReady(worker=worker)
        self._calls[self._actors[worker].next.remote()] = worker
        return Predicted(worker=worker, part=part)

    def _finished_call(self) -> Any:
        ready, _ = ray.wait([*self._calls], num_returns=1, timeout=_TOLD_AFTER_S)
        if not ready and not self._has_started:
            logger.warning(
                "Predictions wait for the first worker to start. It needs %s of the cluster.",
                self._demand,
            )
            self._has_started = True
        # No time limit: a part may take any time. The end of its actor also makes the call ready.
        while not ready:
            ready, _ = ray.wait([*self._calls], num_returns=1)
        return ready[0]
