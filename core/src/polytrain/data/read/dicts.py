"""Rows as dicts: a list of them, or whatever else gives one after another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count, islice
from typing import Any

import numpy as np
import pyarrow as pa

from polytrain.data.types.arrays import column_of, is_masked_number
from polytrain.data.types.python_values import check_unchanged
from polytrain.data.types.schemas import conformed, merged_schema
from polytrain.data.types.times import in_unit_of_arrow, is_time
from polytrain.data_errors import ReadError, SourceError, one_line
from polytrain_plugins.type_names import a_type

_AT_ONCE = 10_000
"""Rows that are Python's objects at once: they take many times the memory of a table."""

_REMEDY = "Give dicts of numbers, strings, lists or arrays, with values of one type under each name"


def are_dicts(data: Any) -> bool:
    """Whether this is a list of dicts, or an iterator, which might give some."""
    if isinstance(data, list | tuple):
        return bool(data) and isinstance(data[0], Mapping)
    return isinstance(data, Iterator) and not hasattr(data, "__arrow_c_stream__")


def gives_rows(data: Any) -> bool:
    """Whether this may be a collection of dicts, if it is no other data set.

    Arrays aren't, and neither are torch's loaders and iterable data sets, which may have no end.
    """
    if not isinstance(data, Iterable) or isinstance(data, Mapping | str | bytes | bytearray):
        return False
    is_column = hasattr(data, "dtype") or isinstance(data, pa.Array | pa.ChunkedArray)
    return not is_column and not is_of_torch(data)


def is_of_torch(data: Any) -> bool:
    """Whether this is one of torch's classes, or made from one."""
    return any(kind.__module__.partition(".")[0] == "torch" for kind in type(data).__mro__)


def table_of_dicts(rows: Iterable[Any]) -> pa.Table:
    """The rows as one table. What a dict lacks is missing.

    Raises:
        SourceError: one isn't a dict, or the values of a column have no type in common.
    """
    numbered = iter(enumerate(rows))
    tables = []
    while some := list(islice(numbered, _AT_ONCE)):
        tables.append(_table(some))
    places = (f"items {_AT_ONCE * number} to {_AT_ONCE * (number + 1) - 1}" for number in count())
    schema = merged_schema(zip(places, (table.schema for table in tables), strict=False), _REMEDY)
    if not tables:
        return schema.empty_table()
    try:
        return pa.concat_tables([_completed(table, schema) for table in tables])
    except ReadError as error:
        raise SourceError(str(error), _REMEDY) from error


def _table(rows: Sequence[tuple[int, Any]]) -> pa.Table:
    for number, row in rows:
        if not isinstance(row, Mapping):
            raise SourceError(f"its item {number} is {a_type(row)}, not a dict", _REMEDY)
    dicts = [{str(name): value for name, value in row.items()} for _, row in rows]
    names = dict.fromkeys(name for row in dicts for name in row)
    columns = {name: _column(name, [row.get(name) for row in dicts]) for name in names}
    return pa.table(columns) if columns else pa.table({"": pa.nulls(len(rows))}).select([])


def _column(name: str, values: list[Any]) -> pa.Array | pa.ChunkedArray:
    if any(isinstance(value, list | tuple) or getattr(value, "shape", ()) for value in values):
        return column_of(name, values)
    try:
        column = pa.array([_scalar(name, value) for value in values])
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        check_unchanged(name, values, None)
        raise SourceError(f"{name!r} can't become a column: {one_line(error)}", _REMEDY) from error
    check_unchanged(name, values, column.type)
    return column


def _scalar(name: str, value: Any) -> Any:
    """Arrays and tensors of one number as what Arrow takes for numbers; times as it has them."""
    if is_masked_number(value):
        return None
    if is_time(value):
        return in_unit_of_arrow(name, value[()])
    return value.item() if hasattr(value, "shape") and not isinstance(value, np.generic) else value


def _completed(table: pa.Table, schema: pa.Schema) -> pa.Table:
    absent = {name: None for name in schema.names if name not in table.column_names}
    if not table.column_names:
        table = pa.table({"": pa.nulls(table.num_rows)})
    return conformed(table, schema, "a dict", absent)
