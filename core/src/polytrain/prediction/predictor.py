"""The work of a process that predicts: it loads a model, and predicts small tables of rows."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
import pyarrow as pa

from polytrain.data.read.describe import Source
from polytrain.data.read.pieces import in_steps
from polytrain.data.shards.rows import PieceRows
from polytrain.data.types.nested import tensors_of
from polytrain.functions.pickling import dumps
from polytrain.prediction.model_files import ModelFiles
from polytrain.prediction.output_files import OutputFiles
from polytrain.prediction.parts import Part, Unit, cut
from polytrain.workers.processes.channel import ConnectionClosedError, SocketChannel
from polytrain_plugins import Backend, Predictions
from polytrain_plugins.returned import engine_of, predictor_of
from polytrain_plugins.type_names import a_type


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

    keep: Mapping[str, str]
    """Key column → its name in the output."""

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
            self._predict = predictor_of(engine_of(task.backend), directory, task.options)

    def predicted(self, unit: Unit, rows: Iterable[bytes] | None = None) -> Iterator[PredictedPart]:
        """Predict the parts of a unit one by one.

        Args:
            unit: the parts.
            rows: `streams` of the rows of the parts, unless this process reads them.
        """
        if rows is None:
            whole = range(unit[0].rows.start, unit[-1].rows.stop)
            source = self._task.source
            tables = PieceRows(source.pieces, source.schema).scan(whole, self._task.columns)
        else:
            tables = (pa.ipc.open_stream(stream).read_all() for stream in rows)
        for part, cuts in groupby(cut(tables, unit), key=itemgetter(0)):
            yield self._finished(part, (table for _, table in cuts))

    def _finished(self, part: Part, tables: Iterator[pa.Table]) -> PredictedPart:
        if self._task.output is None:
            found = [self._of_table(table) for table in tables]
            return PredictedPart(number=part.number, predictions=joined(found))
        keep = self._task.keep
        with self._task.output.writing(part.file) as write:
            for table in tables:
                write(
                    as_table(
                        self._of_table(table),
                        table.select([*keep]).rename_columns([*keep.values()]),
                        prediction_column=self._task.prediction_column,
                    )
                )
        return PredictedPart(number=part.number, predictions=None)

    def _of_table(self, table: pa.Table) -> Predictions:
        table = table.select(list(self._task.model_columns))
        size = self._task.batch_size or table.num_rows
        batches = (table.slice(start, size) for start in range(0, table.num_rows, size))
        return joined([checked(self._predict(batch), batch.num_rows) for batch in batches])


def streams(table: pa.Table) -> Iterator[bytes]:
    """Yield the rows of a table, a few at a time, for another process.

    A pickle of a part of a table would hold all of the table's memory.
    """
    for rows in in_steps(table):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, rows.schema) as stream:
            stream.write_table(rows)
        yield sink.getvalue().to_pybytes()


def joined(parts: Sequence[Predictions]) -> Predictions:
    """Join the predictions of consecutive rows."""
    first = parts[0]
    if isinstance(first, Mapping):
        by_name = [part for part in parts if isinstance(part, Mapping)]
        return {name: np.concatenate([part[name] for part in by_name]) for name in first}
    return parts[0] if len(parts) == 1 else np.concatenate(parts)  # type: ignore[arg-type]  # all are of one kind


def checked(predictions: Predictions, rows: int) -> Predictions:
    """Return the predictions if there is one for each row.

    Raises:
        TypeError: they aren't arrays.
        ValueError: there are more or fewer.
    """
    arrays = predictions if isinstance(predictions, Mapping) else {"": predictions}
    for name, array in arrays.items():
        if not hasattr(array, "shape"):
            raise TypeError(
                f"The backend's engine predicted {a_type(array)}. Return an array whose first axis "
                "is the rows, or several by name"
            )
        found = array.shape[0] if array.shape else "no"
        if found != rows:
            of = f" of {name!r}" if name else ""
            raise ValueError(
                f"The model returned {found} predictions{of} for {rows} rows. Return an array "
                "whose first axis is the rows"
            )
    return predictions


def as_table(predictions: Predictions, keys: pa.Table, *, prediction_column: str) -> pa.Table:
    """Return a table with the key columns, followed by the predictions.

    Args:
        predictions: an array `(rows, …)`, or several by name.
        keys: key columns, with as many rows.
        prediction_column: name of the column of a single array; several have their own names.

    Raises:
        ValueError: a key column has the name of predictions.
    """
    if not isinstance(predictions, Mapping):
        predictions = {prediction_column: predictions}
    for name, array in predictions.items():
        if name in keys.column_names:
            raise ValueError(
                f"keep: {name!r} is also the name of predictions of the model. Leave it out of "
                "keep, or have the model return a different name"
            )
        keys = keys.append_column(str(name), _column(array))
    return keys


def _column(array: np.ndarray[Any, Any]) -> pa.Array:
    """Return a column of numbers, of lists of one length, or of tensors."""
    array = np.ascontiguousarray(array)
    if array.dtype.name == "bfloat16":
        # Arrow has none.
        array = array.astype(np.float32)
    if array.ndim == 1:
        return pa.array(array)
    if array.ndim == 2:
        return pa.FixedSizeListArray.from_arrays(pa.array(array.reshape(-1)), array.shape[1])
    return tensors_of(array)


def main(connection: socket.socket, descriptors: Sequence[int]) -> int:
    """Predict units until the driver closes the connection; return the exit code."""
    channel = SocketChannel(connection)
    try:
        _, task, variables = channel.receive()
        # No library has looked for GPUs before.
        os.environ.update(variables)
        predictor = Predictor(pickle.loads(task))
        while True:
            channel.send(["ready"])
            _, unit, count = channel.receive()
            rows = None if count is None else (channel.receive()[1] for _ in range(count))
            for part in predictor.predicted(pickle.loads(unit), rows):
                channel.send(["predicted", dumps(part)])
    except ConnectionClosedError:
        return 0
    except BaseException as error:
        with contextlib.suppress(OSError):  # the driver may be gone
            channel.send(["raised", dumps(portable(error))])
        return 1


def portable(error: BaseException) -> BaseException:
    """Return an exception for another process, with its traceback here as a note."""
    text = "".join(traceback.format_exception(error))
    error.add_note(f"\nIn the worker process:\n{text.rstrip()}")
    if not isinstance(error, Exception):
        # There it would end the program, silently if the model has called `sys.exit`.
        return RuntimeError(text)
    try:
        pickle.loads(dumps(error))
    except Exception:  # an exception's __reduce__ may raise anything
        return RuntimeError(text)
    return error
