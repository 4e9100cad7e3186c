"""Runs a model in the process that predicts, on small tables of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

import pyarrow as pa

from polytrain.data.read.describe import Source
from polytrain.data.read.pieces import in_steps
from polytrain.data.shards.rows import PieceRows
from polytrain.prediction.columns import as_table, checked, joined
from polytrain.prediction.model_files import ModelFiles
from polytrain.prediction.output_files import OutputFiles
from polytrain.prediction.parts import Part, Unit, cut
from polytrain_plugins import Backend, Predictions


@dataclass(frozen=True, kw_only=True)
class PredictionTask:
    """The task of every process that predicts."""

    backend: Backend
    model: ModelFiles
    source: Source
    """The data set; without pieces if workers get the rows from the driver."""

    columns: tuple[str, ...]
    """The columns to read."""

    model_columns: tuple[str, ...]
    """The columns that the model gets."""

    batch_size: int | None
    """Maximum rows of a call of the model; None for as many as are read at once."""

    keep: tuple[str, ...]
    prediction_column: str
    output: OutputFiles | None
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedPart:
    """A predicted part."""

    number: int
    predictions: Predictions | None
    """The predictions; None if they were stored."""


class Predictor:
    """A model that is loaded once and predicts several units."""

    def __init__(self, task: PredictionTask) -> None:
        self._task = task
        with task.model.directory() as directory:
            self._predict: Callable[[pa.Table], Predictions] = task.backend.engine().predictor(
                directory, **task.options
            )

    def predicted(self, unit: Unit, rows: pa.Table | None = None) -> Iterator[PredictedPart]:
        """Predict the parts of a unit one by one.

        Args:
            unit: the parts.
            rows: the rows of the parts, unless this process reads them.
        """
        if rows is None:
            whole = range(unit[0].rows.start, unit[-1].rows.stop)
            source = self._task.source
            tables = PieceRows(source.pieces, source.schema).scan(whole, self._task.columns)
        else:
            tables = in_steps(rows)
        for part, cuts in groupby(cut(tables, unit), key=itemgetter(0)):
            yield self._finished(part, (table for _, table in cuts))

    def _finished(self, part: Part, tables: Iterator[pa.Table]) -> PredictedPart:
        if self._task.output is None:
            found = [self._of_table(table) for table in tables]
            return PredictedPart(number=part.number, predictions=joined(found))
        with self._task.output.writing(part.file) as write:
            for table in tables:
                write(
                    as_table(
                        self._of_table(table),
                        table.select(list(self._task.keep)),
                        prediction_column=self._task.prediction_column,
                    )
                )
        return PredictedPart(number=part.number, predictions=None)

    def _of_table(self, table: pa.Table) -> Predictions:
        table = table.select(list(self._task.model_columns))
        size = self._task.batch_size or table.num_rows
        batches = (table.slice(start, size) for start in range(0, table.num_rows, size))
        return joined([checked(self._predict(batch), batch.num_rows) for batch in batches])
