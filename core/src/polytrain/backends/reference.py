"""The reference backend: complete, in plain Python and NumPy, to read and to test the kit with.

It fits a linear model by gradient descent. Its collective is the core's `SocketCollective`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from polytrain.extension import SocketCollective
from polytrain_plugins import (
    Backend,
    Capabilities,
    Demand,
    Engine,
    Job,
    Member,
    Offer,
    Problem,
    Session,
    Shard,
    World,
    hookimpl,
    missing_columns,
    needed_without_function,
    options_beside_function,
)

Vector = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, kw_only=True)
class Reference(Backend):
    """Linear regression by gradient descent."""

    name: ClassVar[str] = "reference"
    contract_version: ClassVar[int] = 1
    capabilities: ClassVar[Capabilities] = Capabilities(declarative=True, predictive=True)
    mutable_on_resume: ClassVar[frozenset[str]] = frozenset({"rounds"})

    rounds: int = 10
    """Gradient steps over all rows."""

    label: str | None = None
    """Column to predict; all others are features."""

    learning_rate: float = 0.1

    @property
    def total_steps(self) -> int:
        return self.rounds

    def problems(self, job: Job) -> Iterable[Problem]:
        if job.has_training_function:
            yield from options_beside_function(self, ("rounds", "label", "learning_rate"))
            return
        yield from needed_without_function(self, label="Name the column to predict")
        yield from missing_columns(job, label=self.label)

    def demand(self, job: Job) -> Demand:
        return Demand(reads_tables=not job.has_training_function, leader_ports=1)

    def engine(self) -> ReferenceEngine:
        return ReferenceEngine(self)


class ReferenceEngine(Engine[Vector]):
    """The model is its vector of coefficients, the intercept last."""

    def __init__(self, options: Reference) -> None:
        self._options = options
        self._collective = SocketCollective()

    @contextmanager
    def offering(self, me: Member) -> Iterator[Offer]:
        with self._collective.offering(me) as offer:
            yield offer

    @contextmanager
    def joined(self, world: World) -> Iterator[None]:
        with self._collective.joined(world):
            yield

    def sum_over_ranks(self, values: Sequence[int], world: World) -> list[int]:
        summed: list[int] = self._collective.sum(np.array(values)).tolist()
        return summed

    def gather_over_ranks(self, piece: bytes, world: World, *, call: str) -> list[bytes]:
        return self._collective.all_gather(piece)

    def train(self, shards: Mapping[str, Shard], session: Session) -> Vector:
        features, labels = self._matrix(shards["train"])
        coefficients, first = np.zeros(features.shape[1]), 0
        if session.checkpoint is not None:
            coefficients = self.load(session.checkpoint)
            first = json.loads((session.checkpoint / "rounds.json").read_text())
        for round_ in range(first, self._options.rounds):
            errors = features @ coefficients - labels
            local = np.append(features.T @ errors, [np.sum(errors**2), len(labels)])
            *gradient, squared, rows = self._collective.sum(local)
            coefficients = coefficients - self._options.learning_rate * np.array(gradient) / rows
            self._rounds_done = round_ + 1
            session.report(
                step=round_ + 1, metrics={"train-mse": squared / rows}, model=coefficients
            )
        return coefficients

    def save(self, model: Vector, directory: Path) -> None:
        np.save(directory / "coefficients.npy", model, allow_pickle=False)
        (directory / "rounds.json").write_text(json.dumps(self._rounds_done))
        (directory / "columns.json").write_text(json.dumps(self._columns))

    def load(self, directory: Path) -> Vector:
        loaded: Vector = np.load(directory / "coefficients.npy", allow_pickle=False)
        return loaded

    def model_columns(
        self, directory: Path, columns: Sequence[str], **options: Any
    ) -> Sequence[str]:
        read: list[str] = json.loads((directory / "columns.json").read_text())
        return read

    def predictor(self, directory: Path, **options: Any) -> Callable[[pa.Table], Vector]:
        if options:
            raise TypeError(f"The reference backend has no option {', '.join(sorted(options))}.")
        model, names = self.load(directory), self.model_columns(directory, ())

        def predicted(table: pa.Table) -> Vector:
            # Row by row: a matrix product may depend on how many rows there are.
            found: Vector = (_features(table, names) * model).sum(axis=1)
            return found

        return predicted

    _rounds_done = 0
    _columns: Sequence[str] = ()

    def _matrix(self, shard: Shard) -> tuple[Vector, Vector]:
        frame = shard.to_arrow()
        self._columns = [name for name in frame.column_names if name != self._options.label]
        return _features(frame, self._columns), frame.column(self._options.label).to_numpy().astype(
            float
        )


def _features(table: pa.Table, names: Sequence[str]) -> Vector:
    """The columns as a matrix, with a column of ones for the intercept."""
    columns = [table.column(name).to_numpy().astype(float) for name in names]
    return np.column_stack([*columns, np.ones(table.num_rows)])


@hookimpl
def polytrain_backends() -> list[type[Backend]]:
    """What the entry point of this module provides."""
    return [Reference]
