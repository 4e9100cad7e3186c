"""Files in Arrow's own format (IPC, also called Feather): read record batch by record batch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from polytrain.data.read.file_version import UNKNOWN, FileVersion, check_unchanged, version_of
from polytrain.data.read.pieces import Piece, in_steps
from polytrain.data.types.extension_types import plain_columns
from polytrain.data.types.missing import Missing, found_missing
from polytrain.data.types.schemas import (
    bare,
    columns_to_count,
    conformed,
    refuse_repeated,
    subschema,
)
from polytrain.data.types.unreadable import refuse_unreadable
from polytrain.data.types.views import without_views
from polytrain.data_errors import ReadError, SourceError, one_line
from polytrain.storage.filesystems import find


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordBatchPiece(Piece):
    """One record batch of an Arrow file."""

    path: str
    batch: int
    rows: int
    schema: pa.Schema
    """In the types of the data set, which may be wider than the file's."""

    constants: Mapping[str, Any] = field(default_factory=dict)
    """Columns that aren't in the file, with the value that all its rows have."""

    version: FileVersion = UNKNOWN

    @property
    def where(self) -> str:
        return f"{self.path!r} (record batch {self.batch})"

    def read(self, start: int, stop: int, columns: Sequence[str] | None = None) -> pa.Table:
        schema = subschema(self.schema, self.schema.names if columns is None else list(columns))
        stored = [name for name in schema.names if name not in self.constants]
        if not stored:
            return conformed(pa.table({"": pa.nulls(stop - start)}), schema, "", self.constants)
        try:
            check_unchanged(self.where, self.version, version_of(find(self.path)))
            with _opened(self.path, stored) as file:
                table = _table(file, self.batch)
        except (pa.ArrowException, OSError) as error:
            raise ReadError(f"{self.where} can't be read: {one_line(error)}") from error
        if table.num_rows != self.rows:
            raise ReadError(
                f"{self.where} has {table.num_rows} rows where it had {self.rows}: the file has "
                "changed since the run began. Give a run files that stay as they are"
            )
        return conformed(table.slice(start, stop - start), schema, self.where, self.constants)

    def scan(
        self, start: int, stop: int, columns: Sequence[str] | None = None
    ) -> Iterator[pa.Table]:
        # A record batch can only be read whole.
        yield from in_steps(self.read(start, stop, columns))


@dataclass(frozen=True, slots=True, kw_only=True)
class IpcFile:
    """What is known of an Arrow file once it was read."""

    place: str
    schema: pa.Schema
    batches: tuple[int, ...]
    """Rows of each."""

    missing: frozenset[Missing]
    """Columns in which values are missing."""

    version: FileVersion

    @property
    def rows(self) -> int:
        """Rows of the file."""
        return sum(self.batches)

    def pieces(self, schema: pa.Schema, constants: Mapping[str, Any]) -> Iterator[Piece]:
        """A piece for each record batch that has rows, in the types of this schema."""
        for number, rows in enumerate(self.batches):
            if rows:
                yield RecordBatchPiece(
                    path=self.place,
                    batch=number,
                    rows=rows,
                    schema=schema,
                    constants=constants,
                    version=self.version,
                )


def described(
    place: str, columns: Sequence[str] | None = None, *, elsewhere: Collection[str] = ()
) -> IpcFile:
    """Count a file's rows and missing values, one record batch at a time.

    The footer tells neither.

    Args:
        place: a path or an address.
        columns: which columns; all by default.
        elsewhere: columns that the file need not have.

    Raises:
        SourceError: it can't be read, or has columns of the same name.
    """
    try:
        version = version_of(find(place))
        with _opened(place) as file:
            names = file.schema.names
        refuse_repeated(names, repr(place))
        wanted = columns_to_count(columns, names, elsewhere=elsewhere, of=repr(place))
        missing: set[Missing] = set()
        rows = []
        with _opened(place, wanted) as file:
            refuse_unreadable(subschema(file.schema, wanted))
            notes = file.schema.metadata
            schema = _plain(pa.Table.from_batches([], file.schema)).schema
            for number in range(file.num_record_batches):
                table = _table(file, number)
                rows.append(table.num_rows)
                missing |= found_missing(table)
    except PermissionError as error:
        raise SourceError(f"{place!r} can't be read: {one_line(error)}", "Make it readable") from (
            error
        )
    except (pa.ArrowException, OSError) as error:
        raise SourceError(
            f"{place!r} can't be read: {one_line(error)}",
            "Replace or remove it. If it is a stream, as Hugging Face's files are, write it as a "
            "file with pyarrow.feather.write_feather",
        ) from error
    return IpcFile(
        place=place,
        schema=bare(schema).with_metadata(notes),
        batches=tuple(rows),
        missing=frozenset(missing),
        version=version,
    )


@contextmanager
def _opened(place: str, columns: Collection[str] | None = None) -> Iterator[Any]:
    """The file, of which only these columns are read."""
    where = find(place)
    with where.filesystem.open_input_file(where.path) as source:
        file = pa.ipc.open_file(source)
        if columns is not None:
            names = file.schema.names
            fields = [index for index, name in enumerate(names) if name in columns]
            if fields and len(fields) < len(names):
                file = pa.ipc.open_file(
                    source, options=pa.ipc.IpcReadOptions(included_fields=fields)
                )
        yield file


def _table(file: Any, number: int) -> pa.Table:
    return _plain(pa.Table.from_batches([file.get_batch(number)]))


def _plain(table: pa.Table) -> pa.Table:
    """In types that every library reads."""
    return without_views(plain_columns(table))
