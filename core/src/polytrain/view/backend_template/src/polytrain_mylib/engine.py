"""The engine: what runs in each worker process. It may import the library."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from polytrain.extension import SocketCollective
from polytrain_mylib.backend import Mylib
from polytrain_mylib.model import LinearModel, Numbers
from polytrain_plugins import Engine, Member, Offer, Session, Shard, World

MODEL_FILE = "model.json"


class MylibEngine(Engine[LinearModel]):
    """One rank."""

    def __init__(self, options: Mylib) -> None:
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

    def train(self, shards: Mapping[str, Shard], session: Session) -> LinearModel:
        # This rank's rows.
        table = shards["train"].to_arrow()
        columns = [name for name in table.column_names if name != self._options.label]
        features = _matrix(table, columns)
        labels = table.column(self._options.label).to_numpy().astype(float)
        if session.checkpoint is not None:
            model = self.load(session.checkpoint)
        else:
            model = LinearModel.untrained(columns)
        while model.rounds < self._options.rounds:
            # Every rank adds its rows' part, gets the sum, and makes the same step.
            sums = self._collective.sum(model.sums(features, labels))
            model = model.stepped(sums, self._options.learning_rate)
            metrics = {"train-mse": model.mean_squared_error(sums)}
            session.report(step=model.rounds, metrics=metrics, model=model)
        return model

    def save(self, model: LinearModel, directory: Path) -> None:
        (directory / MODEL_FILE).write_text(model.to_json())

    def load(self, directory: Path) -> LinearModel:
        return LinearModel.from_json((directory / MODEL_FILE).read_text())

    def model_columns(
        self, directory: Path, columns: Sequence[str], **options: Any
    ) -> Sequence[str]:
        return self.load(directory).columns

    def predict(self, model: LinearModel, table: pa.Table, **options: Any) -> Numbers:
        if options:
            raise TypeError(f"mylib has no option {', '.join(sorted(options))} to predict with")
        return model.predicted(_matrix(table, model.columns))


def _matrix(table: pa.Table, columns: Sequence[str]) -> Numbers:
    return np.column_stack([table.column(name).to_numpy().astype(float) for name in columns])
