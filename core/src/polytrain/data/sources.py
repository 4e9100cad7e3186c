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
        return _from_table(name, pa.Table.from_pandas(data, preserve_index=False))
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


def _from_arrays(arrays: Mapping[str, Any]) -> pa.Table:
    import numpy as np

    columns = {str(key): np.asarray(value) for key, value in arrays.items()}
    lengths = {key: len(column) if column.ndim else 0 for key, column in columns.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{key}: {length}" for key, length in lengths.items())
        raise SourceError(f"its arrays differ in length ({listed})", "Give all the same length")
    return pa.table(
        {
            key: pa.array(column)
            if column.ndim == 1
            else pa.FixedShapeTensorArray.from_numpy_ndarray(np.ascontiguousarray(column))
            for key, column in columns.items()
        }
    )


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
    pieces: list[Piece] = []
    schema: pa.Schema | None = None
    for path in paths:
        try:
            found, of_file = _pieces_of_file(path)
        except (pa.ArrowException, OSError) as error:
            raise SourceError(f"{path!r} can't be read: {error}", "Replace or remove it") from error
        missing = [] if schema is None else sorted({*schema.names} ^ {*of_file.names})
        if missing:
            raise SourceError(
                f"{path!r} differs from {paths[0]!r} in the columns {missing}",
                "Give all files of a data set the same columns",
            )
        schema = schema or of_file
        pieces += found
    assert schema is not None
    num_rows = sum(piece.rows for piece in pieces)
    _refuse_empty(num_rows, f"its {len(paths)} file(s) hold no rows")
    info = DatasetInfo(name=name, columns=tuple(schema.names), num_rows=num_rows)
    return Source(info=info, schema=schema, pieces=tuple(pieces))


def _pieces_of_file(path: str) -> tuple[list[Piece], pa.Schema]:
    if _format(path) == "parquet":
        with pyarrow.parquet.ParquetFile(path) as file:
            rows = [
                file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups)
            ]
            return [RowGroupPiece(path, i, n) for i, n in enumerate(rows)], file.schema_arrow
    if _format(path) == "csv":
        table = pyarrow.csv.read_csv(path)
        return [CsvPiece(path, table.num_rows, table.schema)], table.schema
    raise SourceError(f"{path!r} is neither .parquet nor .csv", "Convert it to one of the two")


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
