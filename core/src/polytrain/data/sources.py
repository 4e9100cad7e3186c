"""Data sets as users give them, turned into pieces that any process can read rows from.

A source is described in the driver, where everything that is wrong with it comes to light; its
pieces travel to the agents, each of which reads the rows of its own rank.
"""

from __future__ import annotations

import glob
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from polytrain_plugins import DatasetInfo


class SourceError(Exception):
    """A data set can't be used. Becomes a `Problem` with the data set's name."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(what, remedy)
        self.what = what
        self.remedy = remedy


class Piece(ABC):
    """Some rows of a data set, at a place where every node can read them."""

    rows: int

    @abstractmethod
    def read(self, start: int, stop: int) -> pa.Table:
        """Rows start … stop - 1 of the piece."""


@dataclass(frozen=True, slots=True)
class TablePiece(Piece):
    """A table in this process."""

    table: pa.Table

    @property
    def rows(self) -> int:  # type: ignore[override]  # derived here, stored elsewhere
        return int(self.table.num_rows)

    def read(self, start: int, stop: int) -> pa.Table:
        return self.table.slice(start, stop - start)


@dataclass(frozen=True, slots=True)
class ObjectPiece(Piece):
    """A table in Ray's object store; read without a copy on the node that holds it."""

    reference: Any
    rows: int

    def read(self, start: int, stop: int) -> pa.Table:
        import ray

        return plain_columns(ray.get(self.reference)).slice(start, stop - start)


@dataclass(frozen=True, slots=True)
class RowGroupPiece(Piece):
    """One row group of a Parquet file."""

    path: str
    row_group: int
    rows: int

    def read(self, start: int, stop: int) -> pa.Table:
        with pyarrow.parquet.ParquetFile(self.path) as file:
            return file.read_row_group(self.row_group).slice(start, stop - start)


@dataclass(frozen=True, slots=True)
class CsvPiece(Piece):
    """A CSV file with a header line."""

    path: str
    rows: int
    schema: pa.Schema

    def read(self, start: int, stop: int) -> pa.Table:
        # The types that the driver inferred, so that all ranks agree on them.
        options = pyarrow.csv.ConvertOptions(column_types=self.schema)
        table = pyarrow.csv.read_csv(self.path, convert_options=options)
        return table.slice(start, stop - start)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A data set: what is known of it, and its pieces in order."""

    info: DatasetInfo
    schema: pa.Schema
    pieces: tuple[Piece, ...]


def describe(name: str, data: Any) -> Source:
    """Find out what a data set consists of. Reads file footers; of a CSV file, everything once.

    Args:
        name: the data set's name.
        data: a path, a glob, a directory or a list of paths of Parquet or CSV files; a pandas
            DataFrame; an Arrow table; a dict of arrays of equal length; or a `ray.data.Dataset`.

    Raises:
        SourceError: if there is nothing, or nothing that can be read.
    """
    if isinstance(data, str | Path):
        return _from_files(name, _expand(str(data)))
    if isinstance(data, list | tuple) and data and all(isinstance(d, str | Path) for d in data):
        return _from_files(name, [path for entry in data for path in _expand(str(entry))])
    if isinstance(data, pa.Table):
        return _from_table(name, data)
    if isinstance(data, Mapping):
        return _from_table(name, _from_arrays(data))
    kind = type(data)
    if kind.__module__.partition(".")[0] == "pandas" and kind.__name__ == "DataFrame":
        return _from_table(name, _from_pandas(data))
    if kind.__module__.startswith("ray.data."):
        return _from_ray_data(name, data)
    raise SourceError(
        f"{kind.__module__}.{kind.__qualname__} is not a data set",
        "Pass a path or glob of Parquet or CSV files, a pandas DataFrame, an Arrow table, "
        "a dict of arrays or a ray.data.Dataset",
    )


def plain_columns(table: pa.Table) -> pa.Table:
    """The table with Ray's own tensor columns turned into Arrow's, which need no Ray to be read."""
    for index, field in enumerate(table.schema):
        if type(field.type).__module__.startswith("ray."):
            array = table.column(index).combine_chunks().to_numpy(zero_copy_only=False)
            tensor = pa.FixedShapeTensorArray.from_numpy_ndarray(array)
            table = table.set_column(index, field.name, tensor)
    return table


def _from_table(name: str, table: pa.Table) -> Source:
    _refuse_empty(table.num_rows, "it has no rows")
    info = DatasetInfo(name=name, columns=tuple(table.column_names), num_rows=table.num_rows)
    return Source(info=info, schema=table.schema, pieces=(TablePiece(table),))


def _from_pandas(frame: Any) -> pa.Table:
    try:
        return pa.Table.from_pandas(frame, preserve_index=False)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise SourceError(
            f"the DataFrame can't become a table: {error}",
            "Give each column a name of its own, and values of one type",
        ) from error


def _from_arrays(arrays: Mapping[str, Any]) -> pa.Table:
    columns = {str(name): _array(str(name), value) for name, value in arrays.items()}
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name}: {length}" for name, length in lengths.items())
        raise SourceError(f"its arrays differ in length ({listed})", "Give all the same length")
    return pa.table(columns)


def _array(name: str, value: Any) -> pa.Array:
    """An array of one dimension as a column, of more as a column of tensors."""
    import numpy as np

    remedy = "Give an array with a row for each example, of numbers, booleans or strings"
    try:
        array = np.asarray(value)
        if array.ndim == 1:
            return pa.array(array)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise SourceError(f"{name!r} can't become a column: {error}", remedy) from error
    if array.ndim == 0 or array.dtype.kind not in "iufb":
        what = f"{name!r} is an array of shape {array.shape} and type {array.dtype}"
        raise SourceError(what, remedy)
    return pa.FixedShapeTensorArray.from_numpy_ndarray(np.ascontiguousarray(array))


def _expand(path: str) -> list[str]:
    """The files that a path, a directory or a glob stands for: sorted, and absolute."""
    path = path.removeprefix("file://")
    if "://" in path:
        raise SourceError(
            f"{path!r} is not on a file system that every node mounts",
            "Pass a local path, or ray.data.read_parquet(path) for remote storage",
        )
    absolute = str(Path(path).expanduser().absolute())
    if Path(absolute).is_dir():
        found = [f for f in sorted(glob.glob(f"{glob.escape(absolute)}/*")) if _format(f)]
    elif Path(absolute).exists():
        found = [absolute]
    else:
        found = sorted(glob.glob(absolute, recursive=True))
    if not found:
        raise SourceError(f"no file matches {path!r}", "Check the path; globs are allowed")
    return found


def _format(path: str) -> str | None:
    suffixes = [suffix.lower() for suffix in Path(path).suffixes]
    if ".parquet" in suffixes or ".pq" in suffixes:
        return "parquet"
    return "csv" if ".csv" in suffixes else None


def _from_files(name: str, paths: list[str]) -> Source:
    files = [_File.described(path) for path in paths]
    schema = files[0].schema
    for file in files[1:]:
        schema = _unified(schema, file, first=files[0])
    # With the types of all files: what one rank reads mustn't differ from what another does.
    pieces = tuple(piece for file in files for piece in file.pieces(schema))
    num_rows = sum(piece.rows for piece in pieces)
    _refuse_empty(num_rows, f"its {len(paths)} file(s) hold no rows")
    info = DatasetInfo(name=name, columns=tuple(schema.names), num_rows=num_rows)
    return Source(info=info, schema=schema, pieces=pieces)


@dataclass(frozen=True, slots=True)
class _File:
    """What is known of a file before its rows are read."""

    path: str
    schema: pa.Schema
    rows: tuple[int, ...]
    """Of each row group; a CSV file has one."""

    @classmethod
    def described(cls, path: str) -> _File:
        try:
            if _format(path) == "parquet":
                with pyarrow.parquet.ParquetFile(path) as file:
                    groups = (file.metadata.row_group(i) for i in range(file.num_row_groups))
                    return cls(path, file.schema_arrow, tuple(group.num_rows for group in groups))
            if _format(path) == "csv":
                table = pyarrow.csv.read_csv(path)
                return cls(path, table.schema, (table.num_rows,))
        except (pa.ArrowException, OSError) as error:
            raise SourceError(f"{path!r} can't be read: {error}", "Replace or remove it") from error
        raise SourceError(f"{path!r} is neither .parquet nor .csv", "Convert it to one of the two")

    def pieces(self, schema: pa.Schema) -> list[Piece]:
        """The file's pieces, which are to have the types of this schema."""
        if _format(self.path) == "csv":
            return [CsvPiece(self.path, self.rows[0], schema)]
        return [RowGroupPiece(self.path, group, rows) for group, rows in enumerate(self.rows)]


def _unified(schema: pa.Schema, file: _File, *, first: _File) -> pa.Schema:
    """The schema that fits the files so far, and this one."""
    missing = sorted({*schema.names} ^ {*file.schema.names})
    if missing:
        raise SourceError(
            f"{file.path!r} differs from {first.path!r} in the columns {missing}",
            "Give all files of a data set the same columns",
        )
    try:
        return pa.unify_schemas([schema, file.schema], promote_options="permissive")
    except pa.ArrowException as error:
        raise SourceError(
            f"{file.path!r} differs from {first.path!r} in its columns' types: {error}",
            "Give the columns of all files of a data set the same types",
        ) from error


def _from_ray_data(name: str, dataset: Any) -> Source:
    import ray

    references = dataset.to_arrow_refs()
    count = ray.remote(num_cpus=0)(_rows_and_schema)
    counted = ray.get([count.remote(reference) for reference in references])
    pieces = tuple(
        ObjectPiece(reference, rows)
        for reference, (rows, _) in zip(references, counted, strict=True)
    )
    num_rows = sum(rows for rows, _ in counted)
    _refuse_empty(num_rows, "it has no rows")
    schema = next(schema for rows, schema in counted if rows)
    info = DatasetInfo(name=name, columns=tuple(schema.names), num_rows=num_rows)
    return Source(info=info, schema=schema, pieces=pieces)


def _rows_and_schema(table: pa.Table) -> tuple[int, pa.Schema]:
    plain = plain_columns(table.slice(0, 1)) if table.num_rows else table
    return table.num_rows, plain.schema


def _refuse_empty(num_rows: int, what: str) -> None:
    if num_rows == 0:
        raise SourceError(what, "Pass a data set with rows")
