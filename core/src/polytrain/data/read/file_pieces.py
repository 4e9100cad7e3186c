"""Pieces of files: rows that are read in the data set's types, from the version of a file that was
described."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.fs as pafs

from polytrain.data.read.pieces import Piece
from polytrain.data.read.selection import subschema
from polytrain.data.types.plain import Missing
from polytrain.data.types.schemas import conformed
from polytrain.data_errors import ReadError, SourceError, one_line
from polytrain.linux.progress_page import beat
from polytrain.storage.calls import is_passing, retry
from polytrain.storage.filesystems import ResolvedPath, find
from polytrain.storage.location import RETRY_S
from polytrain.text.described import numbered


class FileVersion(NamedTuple):
    """A file's size and time of modification; None where its storage doesn't know them."""

    size: int | None = None
    modified_ns: int | None = None


UNKNOWN = FileVersion()


@dataclass(frozen=True, slots=True)
class CurrentFile:
    """A file as it is now."""

    place: ResolvedPath
    version: FileVersion


def current_file(path: str, filesystem: Any = None) -> CurrentFile:
    """Find a file, and which version of it is there.

    Args:
        filesystem: where the path lies, if the user has brought a `pyarrow.fs.FileSystem`.

    Raises:
        FileNotFoundError: there is none.
    """
    place = find(path) if filesystem is None else ResolvedPath(filesystem, path, "")
    info = place.filesystem.get_file_info(place.path)
    if info.type == pafs.FileType.NotFound:
        raise FileNotFoundError("there is no such file")
    return CurrentFile(place, FileVersion(info.size, info.mtime_ns))


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePiece(Piece):
    """Rows of a file, or of a part of it. A subclass reads the columns that the file has."""

    path: str
    rows: int
    schema: pa.Schema
    """In the types of the data set, which may be wider than the file's."""

    constants: Mapping[str, Any] = field(default_factory=dict)
    """Columns that aren't in the file, with the value that all its rows have."""

    version: FileVersion = UNKNOWN
    filesystem: Any = None
    """The file system of the path, if the user has passed a `pyarrow.fs.FileSystem`."""

    @property
    def where(self) -> str:
        return repr(self.path)

    @abstractmethod
    def _stored(
        self, file: CurrentFile, rows: range, columns: Sequence[str], *, at_once: bool
    ) -> Iterator[pa.Table]:
        """Read rows with the columns and types of the file, as at least one table.

        Args:
            file: the file, in the version that was described.
            rows: counted within the piece.
            columns: at least one.
            at_once: the rows may be in memory as a whole.
        """

    def in_types(self, schema: pa.Schema, constants: Mapping[str, Any]) -> FilePiece:
        """The piece with a data set's columns.

        Args:
            constants: its columns that the file doesn't have.

        Raises:
            SourceError: a type would change values of the file.
        """
        return replace(self, schema=schema, constants=constants)

    def read(self, start: int, stop: int, columns: Sequence[str] | None = None) -> pa.Table:
        tables = [*self._tables(range(start, stop), columns, at_once=True)]
        # Tables without columns lose their number of rows when they are put together.
        return tables[0] if len(tables) == 1 else pa.concat_tables(tables)

    def scan(
        self, start: int, stop: int, columns: Sequence[str] | None = None
    ) -> Iterator[pa.Table]:
        yield from self._tables(range(start, stop), columns, at_once=False)

    def _tables(
        self, rows: range, columns: Sequence[str] | None, *, at_once: bool
    ) -> Iterator[pa.Table]:
        schema = subschema(self.schema, self.schema.names if columns is None else list(columns))
        stored = [name for name in schema.names if name not in self.constants]
        if not stored:
            yield conformed(pa.table({"": pa.nulls(len(rows))}), schema, "", self.constants)
            return
        tables: Iterator[pa.Table] | None = None

        def next_table() -> pa.Table | None:
            nonlocal tables
            try:
                tables = tables or self._of_current(rows, stored, at_once=at_once)
                return next(tables, None)
            except OSError:
                tables = None
                # A rank that waits for its data doesn't hang.
                beat()
                raise

        retried = partial(retry, next_table, retry_s=RETRY_S, what=self.where, passes=is_passing)
        try:
            while (table := retried()) is not None:
                yield conformed(table, schema, self.where, self.constants)
                rows = rows[table.num_rows :]
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise ReadError(f"{self.where} can't be read: {one_line(error)}") from error

    def _of_current(
        self, rows: range, columns: Sequence[str], *, at_once: bool
    ) -> Iterator[pa.Table]:
        file = current_file(self.path, self.filesystem)
        self._check_version(file.version)
        yield from self._stored(file, rows, columns, at_once=at_once)

    def _check_version(self, now: FileVersion) -> None:
        for what, before, after in (
            ("its size was {} bytes, and is {}", self.version.size, now.size),
            ("it was modified", self.version.modified_ns, now.modified_ns),
        ):
            if None not in (before, after) and before != after:
                raise ReadError(
                    f"{self.where} has changed since the run began: {what.format(before, after)}. "
                    "Give a run files that stay as they are"
                )

    def _check_rows(self, found: int) -> None:
        if found != self.rows:
            raise ReadError(
                f"{self.where} has {numbered(found, 'row')} where it had {self.rows}: the file has "
                "changed since the run began. Give a run files that stay as they are"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedFile:
    """The facts about a file that are known before its rows are read."""

    place: str
    schema: pa.Schema
    """The file's columns, with pandas' notes of an index."""

    missing: frozenset[Missing]
    """Columns in which values are missing, as far as that is known."""

    pieces: tuple[FilePiece, ...]
    """The whole file, in its own types; pieces may have no rows."""

    @property
    def rows(self) -> int:
        """Rows of the file."""
        return sum(piece.rows for piece in self.pieces)

    def pieces_in(self, schema: pa.Schema, constants: Mapping[str, Any]) -> Iterator[FilePiece]:
        """The pieces that have rows, with a data set's columns; see `FilePiece.in_types`."""
        for piece in self.pieces:
            if piece.rows:
                yield piece.in_types(schema, constants)


@contextmanager
def describing(
    place: str, explained: Callable[[str, Exception], tuple[str, str]] | None = None
) -> Iterator[None]:
    """Name the file in errors that are raised while it is described.

    Args:
        explained: returns what is wrong with it, and the remedy.

    Raises:
        SourceError: the file can't be read.
    """
    try:
        yield
    except PermissionError as error:
        raise SourceError(unreadable(place, error), "Make it readable") from error
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        what, remedy = (
            (unreadable(place, error), "Replace or remove it")
            if explained is None
            else explained(place, error)
        )
        raise SourceError(what, remedy) from error


def unreadable(place: str, error: Exception) -> str:
    """The message of a file that can't be read."""
    return f"{place!r} can't be read: {one_line(error)}"
