"""Turns data sets in memory (frames, tables, arrays of any library, dicts) into one table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import compress, count, islice
from pathlib import PurePath
from typing import Any

import numpy as np
import pyarrow as pa

from polytrain.data.read.pieces import Pieces, TablePiece
from polytrain.data.read.selection import chosen, columns_to_read, refuse_repeated
from polytrain.data.types.arrays import column_of, is_masked_number, refuse_objects, table_of
from polytrain.data.types.nested import lists_to_numpy, tensors_of
from polytrain.data.types.plain import found_missing, noted, plain_columns, refuse_unreadable
from polytrain.data.types.python_values import check_unchanged, in_unit_of_arrow, is_time
from polytrain.data.types.schemas import conformed, merged_schema, widened
from polytrain.data_errors import ReadError, SourceError, one_line
from polytrain_plugins.type_names import a_type, with_article


def from_memory(data: Any, columns: Sequence[str] | None) -> Pieces | None:
    """Describe a data set in memory; None if it is something else.

    Raises:
        SourceError: it can't become a table.
    """
    table = _table(data, columns)
    if table is None:
        return None
    found = from_table(table, columns)
    return replace(found, index=(*found.index, *_index_names(data))) if columns is None else found


def from_table(table: pa.Table, columns: Sequence[str] | None) -> Pieces:
    """A table as a data set of one piece."""
    refuse_repeated(table.column_names, "the table")
    names, index = columns_to_read(table.schema, columns)
    # By pandas' notes of an index, Arrow would take its column out of a frame again.
    table = table.select(names).replace_schema_metadata(None)
    refuse_unreadable(table.schema)
    table = widened(plain_columns(table))
    missing = found_missing(table)
    if missing:
        table = pa.table(table.columns, schema=noted(table.schema, missing))
    return Pieces(schema=table.schema, pieces=(TablePiece(table),), index=index)


def _table(data: Any, columns: Sequence[str] | None) -> pa.Table | None:
    if isinstance(data, pa.Table):
        return data
    kind = type(data)
    library = kind.__module__.partition(".")[0]
    if library == "pandas":
        return _from_pandas(data, columns) if kind.__name__ == "DataFrame" else None
    if library == "polars" and kind.__name__ == "LazyFrame":
        data = _collected(data, columns)
    if library == "polars" and type(data).__name__ == "DataFrame":
        read = [name for name in data.columns if columns is None or name in columns]
        refuse_objects({name: data.schema[name] for name in read})
    if library == "datasets":
        return _from_hugging_face(data)
    if isinstance(data, Mapping):
        return table_of(dict(compress(data.items(), _are_read(data, columns))))
    is_column = isinstance(data, pa.Array | pa.ChunkedArray) or (
        library == "polars" and kind.__name__ == "Series"
    )
    return _from_stream(data) if hasattr(data, "__arrow_c_stream__") and not is_column else None


def _are_read(names: Iterable[Any], columns: Sequence[str] | None) -> list[bool]:
    """Whether each column is read. Others need not fit into a table.

    Raises:
        SourceError: a column is missing, or asked for twice.
    """
    known = [*map(str, names)]
    wanted = known if columns is None else chosen(columns, known)
    return [name in wanted for name in known]


def _index_names(data: Any) -> tuple[str, ...]:
    """The names of a DataFrame's index; none if it has none, or this is anything else."""
    if type(data).__module__.partition(".")[0] != "pandas":
        return ()
    return tuple(str(name) for name in data.index.names if name is not None)


def _from_pandas(frame: Any, columns: Sequence[str] | None) -> pa.Table:
    names = _index_names(frame)
    if wanted := [name for name in names if name in (columns or ()) and name not in frame.columns]:
        frame = frame.reset_index(level=wanted)
    if columns is not None:
        frame = frame.loc[:, _are_read(frame.columns, columns)]
    try:
        # Arrow knows the machine's own order of bytes only.
        foreign = {
            name: kind.newbyteorder("=")
            for name, kind in frame.dtypes.items()
            if getattr(kind, "byteorder", "=") in "<>" and not getattr(kind, "isnative", True)
        }
        table = pa.Table.from_pandas(
            frame.astype(foreign) if foreign else frame, preserve_index=False
        )
    except (pa.ArrowException, TypeError, ValueError) as error:
        for index, name in enumerate(frame.columns):
            check_unchanged(str(name), frame.iloc[:, index], None)
        raise SourceError(
            f"the DataFrame can't become a table: {one_line(error)}",
            "Give each column a name of its own, and values of one type",
        ) from error
    for index, name in enumerate(frame.columns):
        check_unchanged(str(name), frame.iloc[:, index], table.schema.field(index).type)
    return table


def _collected(frame: Any, columns: Sequence[str] | None) -> Any:
    try:
        if columns is not None:
            # Selected first: other columns need not be computed.
            frame = frame.select(chosen(columns, frame.collect_schema().names()))
        return frame.collect()
    except SourceError:
        raise
    except Exception as error:
        # The user's query may raise anything.
        raise SourceError(
            f"the LazyFrame can't be collected: {one_line(error)}", "Correct its query"
        ) from error


def _from_stream(data: Any) -> pa.Table:
    try:
        return pa.RecordBatchReader.from_stream(data).read_all()
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise SourceError(
            f"{type(data).__qualname__} can't become a table: {one_line(error)}",
            "Pass something with named columns",
        ) from error


def _from_hugging_face(dataset: Any) -> pa.Table:
    kind = type(dataset).__name__
    if isinstance(dataset, Mapping):
        raise SourceError(
            f"it is {with_article(kind)}, which holds the data sets "
            f"{', '.join(map(repr, dataset))}",
            f"Pass one of them, such as dataset[{next(iter(dataset), 'train')!r}]",
        )
    if kind != "Dataset":
        raise SourceError(
            f"a datasets.{kind} can only be read from its start to its end",
            "Load it without streaming=True, or write it to Parquet files",
        )
    if dataset.format["type"] == "custom":
        raise SourceError(
            "it has a function of its own, set by with_transform, which would be left out",
            "Call reset_format() on it, and pass the function as the data set's transform",
        )
    # With the indices applied that select(), shuffle() and the like leave behind.
    shown = None if dataset.format["output_all_columns"] else dataset.format["columns"]
    table = dataset.with_format("arrow", columns=shown)[:]
    for index, field in enumerate(table.schema):
        if isinstance(field.type, pa.BaseExtensionType) and type(field.type).__module__.startswith(
            "datasets."
        ):
            table = table.set_column(index, field.name, _plain_arrays(table.column(index)))
    return table


def _plain_arrays(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Turn arrays of Hugging Face into tensors, or lists if they differ in shape or lack rows.

    Other processes would need the library to read its type, and its own conversion would round to
    32 bits.
    """
    lists = pa.chunked_array([chunk.storage for chunk in column.chunks], column.type.storage_type)
    arrays = lists_to_numpy(lists)
    if arrays.dtype == object or not arrays.size:
        return lists
    return pa.chunked_array([tensors_of(arrays)])


def is_place(data: Any) -> bool:
    """Whether this is a path or an address."""
    return isinstance(data, str | PurePath)


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


def table_of_dicts(rows: Iterable[Any], columns: Sequence[str] | None) -> pa.Table:
    """The rows as one table. What a dict lacks is missing; columns that aren't read are empty.

    Raises:
        SourceError: one isn't a dict, or the values of a column have no type in common.
    """
    numbered = iter(enumerate(rows))
    tables = []
    while some := list(islice(numbered, _AT_ONCE)):
        tables.append(_table_of_some(some, columns))
    places = (f"items {_AT_ONCE * number} to {_AT_ONCE * (number + 1) - 1}" for number in count())
    schema = merged_schema(zip(places, (table.schema for table in tables), strict=False), _REMEDY)
    if not tables:
        return schema.empty_table()
    try:
        return pa.concat_tables([_completed(table, schema) for table in tables])
    except ReadError as error:
        raise SourceError(str(error), _REMEDY) from error


def _table_of_some(rows: Sequence[tuple[int, Any]], columns: Sequence[str] | None) -> pa.Table:
    for number, row in rows:
        if not isinstance(row, Mapping):
            raise SourceError(f"its item {number} is {a_type(row)}, not a dict", _REMEDY)
    dicts = [{str(name): value for name, value in row.items()} for _, row in rows]
    names = dict.fromkeys(name for row in dicts for name in row)
    found = {
        name: _column(name, [row.get(name) for row in dicts])
        if columns is None or name in columns
        else pa.nulls(len(rows))
        for name in names
    }
    return pa.table(found) if found else pa.table({"": pa.nulls(len(rows))}).select([])


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
