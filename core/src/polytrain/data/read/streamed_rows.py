"""Rows of a file that is read from its start, as CSV and JSON Lines files are."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from polytrain.data.read.file_version import UNKNOWN, FileVersion, check_unchanged, version_of
from polytrain.data.read.pieces import Piece
from polytrain.data.types.schemas import conformed, subschema
from polytrain.data_errors import ReadError, one_line
from polytrain.storage.filesystems import find


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedPiece(Piece):
    """A file of which every row before the first one that is wanted has to be parsed."""

    path: str
    rows: int
    schema: pa.Schema
    """In the types of the data set, which all ranks agree on."""

    constants: Mapping[str, Any] = field(default_factory=dict)
    """Columns that aren't in the file, with the value that all its rows have."""

    version: FileVersion = UNKNOWN

    @abstractmethod
    def _parsed(self, columns: Sequence[str]) -> Generator[pa.Table, None, None]:
        """Parse the file from its start, a part at a time, after a table without rows.

        Args:
            columns: those of the file that are wanted.
        """

    @property
    def where(self) -> str:
        return repr(self.path)

    def read(self, start: int, stop: int, columns: Sequence[str] | None = None) -> pa.Table:
        return pa.concat_tables(self.scan(start, stop, columns))

    def scan(
        self, start: int, stop: int, columns: Sequence[str] | None = None
    ) -> Iterator[pa.Table]:
        schema = subschema(self.schema, self.schema.names if columns is None else list(columns))
        stored = [name for name in schema.names if name not in self.constants]
        if not stored:
            yield conformed(pa.table({"": pa.nulls(stop - start)}), schema, "", self.constants)
            return
        try:
            check_unchanged(self.where, self.version, version_of(find(self.path)))
            with closing(self._parsed(stored)) as parts:
                # The rows that are wanted may be none.
                yield conformed(next(parts), schema, self.where, self.constants)
                for part in cut(parts, start, stop, rows=self.rows, where=self.where):
                    yield conformed(part, schema, self.where, self.constants)
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise ReadError(f"{self.where} can't be read: {one_line(error)}") from error

    def seekable(self, *, scattered: bool) -> bool:
        return False


def cut(
    parts: Iterable[pa.Table], start: int, stop: int, *, rows: int, where: str
) -> Iterator[pa.Table]:
    """Yield the rows from `start` to `stop`, and read no further than needed.

    Args:
        parts: the file's rows, in order.
        start: the first row.
        stop: the row after the last.
        rows: number of rows that the file had when the run began.
        where: the file, for errors.

    Raises:
        ReadError: the file has fewer rows, or more after its last.
    """
    first = 0
    for part in parts:
        if first >= stop and part.num_rows:
            first += part.num_rows
            break
        skipped = max(start - first, 0)
        if skipped < part.num_rows:
            yield part.slice(skipped, stop - first - skipped)
        first += part.num_rows
        if first >= stop < rows:
            return
    if first < stop or (stop == rows and first != stop):
        raise ReadError(
            f"{where} has {'fewer' if first < stop else 'more'} than {rows} rows: "
            "the file has changed since the run began. Give a run files that stay as they are"
        )
