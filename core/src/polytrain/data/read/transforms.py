"""Applies a user's function to rows as they are read, or, at random, to batches in each epoch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from polytrain.data.read.pieces import Piece, Pieces, WrappedPiece, selected
from polytrain.data.types.arrays import table_of
from polytrain.data.types.columns import column_to_numpy, empty_table, lists_of_numbers
from polytrain.data.types.nested import is_list, is_list_of_numbers, with_parts
from polytrain.data.types.plain import decides_type, found_missing, noted, refuse_unreadable
from polytrain.data.types.schemas import exactly
from polytrain.data_errors import ReadError, SourceError, TransformError, raised_at
from polytrain.text.described import numbered
from polytrain_plugins.type_names import a_type

Batch: TypeAlias = dict[str, np.ndarray[Any, Any]]
Transform: TypeAlias = Callable[[Batch], Mapping[str, Any]]

_TRIAL_ROWS = 8
_SHOWN_ROWS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformedPiece(WrappedPiece):
    """A piece whose rows go through a function."""

    piece: Piece
    transform: Transform
    schema: pa.Schema
    """The columns that the function returns."""

    name: str
    first_row: int
    """The number of the piece's first row in the data set."""

    def read(self, start: int, stop: int, columns: Sequence[str] | None = None) -> pa.Table:
        if start == stop:
            # Functions of users may well not expect that.
            return selected(empty_table(self.schema), columns)
        return selected(self._of(self.piece.read(start, stop), self._rows(start, stop)), columns)

    def scan(
        self, start: int, stop: int, columns: Sequence[str] | None = None
    ) -> Iterator[pa.Table]:
        for table in self.piece.scan(start, stop):
            if table.num_rows:
                rows = self._rows(start, start + table.num_rows)
                yield selected(self._of(table, rows), columns)
                start += table.num_rows

    def take(self, rows: Sequence[int], columns: Sequence[str] | None = None) -> pa.Table:
        shown = ", ".join(str(self.first_row + row) for row in rows[:_SHOWN_ROWS])
        more = f" and {len(rows) - _SHOWN_ROWS} more" if len(rows) > _SHOWN_ROWS else ""
        return selected(self._of(self.piece.take(rows), f"rows {shown}{more}"), columns)

    def _rows(self, start: int, stop: int) -> str:
        return f"rows {self.first_row + start} to {self.first_row + stop - 1}"

    def _of(self, rows: pa.Table, which: str) -> pa.Table:
        where = f"{which} of {self.name!r} ({self.where})"
        return typed(applied(self.transform, rows, where), self.schema, where)


def transformed(name: str, found: Pieces, transform: Transform) -> Pieces:
    """Apply a function wherever pieces are read; try it out on the first few rows.

    Args:
        transform: takes and returns a dict of column name to array, of consecutive rows.

    Raises:
        SourceError: the function fails, or returns no such dict.
    """
    schema = tried(name, found, transform)
    firsts = accumulate((piece.rows for piece in found.pieces), initial=0)
    pieces = (
        TransformedPiece(
            piece=piece, transform=transform, schema=schema, name=name, first_row=first
        )
        for piece, first in zip(found.pieces, firsts, strict=False)
    )
    return Pieces(schema=schema, pieces=tuple(pieces), index=found.index)


def tried(name: str, found: Pieces, transform: Transform) -> pa.Schema:
    """The schema of what a function returns for the first few rows.

    Raises:
        SourceError: the function fails, or returns no such dict.
    """
    remedy = "Correct the function; it takes and returns a dict of column names to arrays"
    if not callable(transform):
        raise SourceError(f"transform is {a_type(transform)}", "Pass a function")
    trial = next(piece for piece in found.pieces if piece.rows)
    rows = min(trial.rows, _TRIAL_ROWS)
    where = f"rows 0 to {rows - 1} of {name!r} ({trial.where})"
    try:
        schema = _known(applied(transform, trial.read(0, rows), where).schema, found.schema)
    except (TransformError, ReadError) as error:
        raise SourceError(str(error), remedy) from error
    if not schema.names:
        raise SourceError("the transform returns no columns", remedy)
    refuse_unreadable(schema)
    return schema


def _known(returned: pa.Schema, given: pa.Schema) -> pa.Schema:
    """The schema with the given types of values that are all missing, or in no list, at first."""
    types = {field.name: field.type for field in given}
    fields = (
        field.with_type(_filled(field.type, types[field.name])) if field.name in types else field
        for field in returned
    )
    return pa.schema(fields, metadata=returned.metadata)


def _filled(kind: pa.DataType, given: pa.DataType) -> pa.DataType:
    """The type with the given one in place of each part that has no values, and so no type."""
    if pa.types.is_null(kind):
        return given.value_type if pa.types.is_dictionary(given) else given
    if is_list(kind) and is_list(given):
        return with_parts(kind, lambda items: _filled(items, given.value_type))
    if pa.types.is_struct(kind) and pa.types.is_struct(given):
        types = {field.name: field.type for field in given}
        return pa.struct(
            [
                field.with_type(_filled(field.type, types.get(field.name, field.type)))
                for field in kind
            ]
        )
    return kind


def applied(transform: Transform, rows: pa.Table, where: str) -> pa.Table:
    """Apply a function to some rows, and make a table of what it returns.

    Raises:
        TransformError: it fails, or returns no such dict.
    """
    batch = {
        field.name: _writable(_array(column, field))
        for field, column in zip(rows.schema, rows.columns, strict=True)
    }
    try:
        result = transform(batch)
    except (Exception, SystemExit) as error:
        raise TransformError(f"{raised_at(error)}: the transform failed on {where}") from error
    if not isinstance(result, Mapping):
        raise TransformError(f"the transform returned {a_type(result)} for {where}, not a dict")
    types = dict(zip(rows.schema.names, rows.schema.types, strict=True))
    try:
        table = table_of({name: _maps(each, types.get(name)) for name, each in result.items()})
    except SourceError as error:
        raise TransformError(
            f"what the transform returned for {where} is no table: {error.what}"
        ) from error
    if table.num_columns and table.num_rows != rows.num_rows:
        raise TransformError(
            f"the transform returned {numbered(table.num_rows, 'row')} for {where}, which are "
            f"{rows.num_rows}. It can't leave rows out or add some. Pass a data set without them, "
            "such as pyarrow.dataset.dataset(path).filter(pyarrow.dataset.field('x') > 0), or "
            "have it return a column of weights that is 0 for them"
        )
    # An array of objects has room for None, be it in other rows.
    roomy = {
        str(name)
        for name, array in result.items()
        if isinstance(array, np.ndarray) and array.dtype == object
    }
    missing = found_missing(table) | {
        field.name for field in table.schema if field.name in roomy and decides_type(field.type)
    }
    return pa.table(table.columns, schema=noted(table.schema, missing))


def _maps(array: Any, given: pa.DataType | None) -> Any:
    """A column of maps that a function passes on; anything else as it is.

    Its rows are lists of pairs. Arrow would take a pair for a list, whose values have one type.
    """
    if given is None or not pa.types.is_map(given) or not isinstance(array, np.ndarray | list):
        return array
    try:
        column = pa.array(array, given)
        # Arrow rounds floats to a map's integers, without a word.
        return column if _are_same(column.to_pylist(), [*array]) else array
    except (pa.ArrowException, OverflowError, ValueError):  # arrays have no one truth value
        return array


def _are_same(found: Any, given: Any) -> bool:
    """Whether values are equal, whatever lists and dicts they are in; NaN is equal to NaN."""
    if isinstance(found, list | tuple):
        is_list = isinstance(given, list | tuple) and len(found) == len(given)
        return is_list and all(map(_are_same, found, given))
    if isinstance(found, dict):
        is_dict = isinstance(given, dict) and found.keys() == given.keys()
        return is_dict and all(_are_same(value, given[name]) for name, value in found.items())
    return bool(found == given or (found != found and given != given))


def _array(column: pa.ChunkedArray, field: pa.Field) -> np.ndarray[Any, Any]:
    # The form of lists doesn't depend on which rows are read together, so that what the function
    # returns has one type.
    if is_list_of_numbers(column.type):
        return lists_of_numbers(column, field, by_type=True)
    return column_to_numpy(column, field)


def _writable(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The array, or a copy of it that may be changed in place, as transforms like to do."""
    return np.require(array, requirements="W")


def typed(table: pa.Table, schema: pa.Schema, where: str) -> pa.Table:
    """The table in the columns and types that the function returned for the first rows.

    Raises:
        TransformError: it has others.
    """
    if set(table.column_names) != set(schema.names):
        raise TransformError(
            f"the transform returned the columns {table.column_names} for {where}, but "
            f"{schema.names} for the first rows"
        )
    arrays = []
    for field in schema:
        column = table.column(field.name)
        try:
            arrays.append(column if column.type == field.type else exactly(column, field.type))
        except pa.ArrowException as error:
            raise TransformError(
                f"the transform returned {column.type} as {field.name!r} for {where}, but "
                f"{field.type} for the first rows"
            ) from error
    return pa.table(arrays, schema=schema)


RandomFunction: TypeAlias = Callable[..., Mapping[str, Any]]

_WORD = 2**64


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomTransform:
    """A function of a batch and a random generator."""

    function: RandomFunction
    schema: pa.Schema
    name: str

    def of(self, rows: pa.Table, where: str, *key: int) -> pa.Table:
        """Apply the function to some rows.

        Args:
            key: numbers that say what is drawn: the same draw the same.

        Raises:
            TransformError: the function failed, or returned other columns or types than before.
        """
        if not rows.num_rows:
            # Functions of users may well not expect that.
            return empty_table(self.schema)
        where = f"{where} of {self.name!r}"
        return typed(applied(_drawing(self.function, *key), rows, where), self.schema, where)


def wants_generator(function: Any) -> bool:
    """Whether a function has a parameter `rng` that nobody has filled."""
    try:
        parameter = inspect.signature(function).parameters.get("rng")
    except (TypeError, ValueError):
        return False
    return parameter is not None and (
        parameter.default is parameter.empty or parameter.default is None
    )


def random_transform(name: str, found: Pieces, function: RandomFunction) -> RandomTransform:
    """A function as it is applied to batches; tries it out on the first few rows.

    Raises:
        SourceError: the function fails, or returns no dict of arrays.
    """
    schema = tried(name, found, _drawing(function, 0))
    return RandomTransform(function=function, schema=schema, name=name)


def _drawing(function: RandomFunction, *key: int) -> Callable[[Batch], Mapping[str, Any]]:
    generator = np.random.default_rng([number % _WORD for number in key])
    return partial(function, rng=generator)
