"""Predictions of a model for any data set, in this process or by workers."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from polytrain.common.data_errors import SourceError
from polytrain.common.plain_values import is_whole
from polytrain.data.shards.rows import PieceRows
from polytrain.data.sources.describe import Source, computed, describe
from polytrain_plugins import Backend, InvalidJobError, Problem, UnsupportedCapabilityError

_ROWS_AT_ONCE = 100_000

Predictions = np.ndarray[Any, Any]


class Predictor:
    """A model that is loaded once and predicts several parts."""

    def __init__(self, backend: Backend, directory: Path, options: Mapping[str, Any]) -> None:
        self._engine = backend.engine()
        self._model = self._engine.load(directory)
        self._options = options

    def predicted(self, table: pa.Table) -> Predictions:
        """The predictions for some rows."""
        return self._engine.predict(self._model, table, **self._options)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    backend: Backend
    files: Mapping[str, bytes]
    """The checkpoint's files, by path."""

    options: Mapping[str, Any]

    def predictor(self) -> Predictor:
        with tempfile.TemporaryDirectory(prefix="polytrain-") as directory:
            for name, content in self.files.items():
                path = Path(directory, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
            return Predictor(self.backend, Path(directory), self.options)


class _Worker:
    """Runs in an actor."""

    def __init__(self, job: _Job) -> None:
        self._predictor = job.predictor()

    def predicted(self, rows: Any) -> Predictions:
        """The predictions for a table, or for rows that have to be read."""
        return self._predictor.predicted(rows if isinstance(rows, pa.Table) else rows())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Rows that are read by the process that predicts them."""

    source: Source
    rows: range

    def __call__(self) -> pa.Table:
        return PieceRows(self.source.pieces, self.source.schema).read(self.rows)


def predicted(
    backend: Backend,
    directory: Path,
    data: Any,
    *,
    num_workers: int | None,
    options: Mapping[str, Any],
) -> Predictions:
    """Predict the rows of a data set; see `Result.predict`."""
    if not backend.capabilities.predictive:
        raise UnsupportedCapabilityError(
            f"The {backend.name} backend doesn't predict: use result.load_model() and its own "
            "method."
        )
    source = _described(data, num_workers)
    rows = source.info.num_rows
    assert rows is not None
    parts = [
        _Part(source=source, rows=range(start, min(start + _ROWS_AT_ONCE, rows)))
        for start in range(0, rows, _ROWS_AT_ONCE)
    ]
    if num_workers == 0 or len(parts) == 1:
        predictor = Predictor(backend, directory, options)
        return np.concatenate([predictor.predicted(part()) for part in parts])
    files = {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }
    job = _Job(backend=backend, files=files, options=options)
    return np.concatenate([*_by_actors(job, parts, num_workers)])


def _by_actors(job: _Job, parts: list[_Part], num_workers: int | None) -> Iterator[Predictions]:
    """The parts' predictions, in order."""
    import ray
    from ray.exceptions import RayTaskError
    from ray.util import ActorPool

    from polytrain.common.ray_state import free_resources
    from polytrain.workers.ray_runtime import running_ray

    with running_ray():
        at_once = num_workers or max(1, int(free_resources().get("CPU", 1)))
        actor = ray.remote(num_cpus=1, max_restarts=3, max_task_retries=3)(_Worker)
        shared = ray.put(job)
        actors: list[Any] = [actor.remote(shared) for _ in range(min(at_once, len(parts)))]
        try:
            pool = ActorPool(actors)
            yield from pool.map(lambda a, part: a.predicted.remote(_sent(part)), parts)
        except RayTaskError as error:
            # The framework's own exception, so that it can be caught by its type.
            raise error.cause from error
        finally:
            for each in actors:
                ray.kill(each)


def _sent(part: _Part) -> Any:
    """What a worker gets: the rows, if they are in this process, or where to read them."""
    return part() if part.source.in_memory else part


def _described(data: Any, num_workers: Any) -> Source:
    if num_workers is not None and (not is_whole(num_workers) or num_workers < 0):
        raise InvalidJobError(
            (
                Problem(
                    field="num_workers",
                    what=f"{num_workers!r} is not a number of workers",
                    remedy="Give 1 or more, 0 to predict in this process, or leave it out",
                ),
            )
        )
    try:
        return computed(describe("data", data))
    except SourceError as error:
        problem = Problem(field="data", what=error.what, remedy=error.remedy)
        raise InvalidJobError((problem,)) from error
