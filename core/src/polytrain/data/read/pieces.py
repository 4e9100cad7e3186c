"""Pieces: rows of a data set, at a place where every process can read them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

SCAN_BYTES = 64 << 20
"""Most bytes of a table in a pass over rows, unless a single row has more."""

SCAN_ROWS = 1 << 16
"""Most rows of such a table."""

_FIRST_ROWS = 256
"""Rows that are read to find out how large they are."""


class Piece(ABC):
    """Some rows of a data set. Pieces can be pickled; only reading opens anything."""

    rows: int

    @property
    @abstractmethod
    def where(self) -> str:
        """The place of the rows, for messages."""

    @abstractmethod
    def read(self, start: int, stop: int, columns: Sequence[str] | None = None) -> pa.Table:
        """Read rows start … stop - 1 of the piece, in the types of the data set's schema.

        Args:
            start: first row, counted within the piece.
            stop: one past the last row.
            columns: which columns, in which order; all by default.

        Raises:
            ReadError: the rows are no longer as they were when the data set was described.
            TransformError: the user's function failed on them.
        """

    def take(self, rows: Sequence[int], columns: Sequence[str] | None = None) -> pa.Table:
        """Read rows from anywhere in the piece, in this order.

        Args:
            rows: their numbers, counted within the piece; at least one.
        """
        return pa.concat_tables([self.read(row, row + 1, columns) for row in rows])

    def scan(
        self, start: int, stop: int, columns: Sequence[str] | None = None
    ) -> Iterator[pa.Table]:
        """The rows of `read` in one pass, as tables of at most `SCAN_ROWS`, about `SCAN_BYTES`."""
        rows = _FIRST_ROWS
        while start < stop:
            table = self.read(start, min(stop, start + rows), columns)
            yield table
            start += table.num_rows
            rows = rows_of_scan(table.nbytes / max(1, table.num_rows))

    def seekable(self, *, scattered: bool) -> bool:
        """Whether reading a few of the rows costs little more than those rows are worth.

        Args:
            scattered: the rows are anywhere in the piece, rather than one after another.
        """
        return not scattered

    @property
    def in_memory(self) -> bool:
        """Whether the rows lie in this process, rather than where every node can read them."""
        return False

    @property
    def reads_into_own_memory(self) -> bool:
        """Whether the tables of `read` and `take` have their memory for themselves: it is no mapped
        file, no cache, and no array of the user's."""
        return False

    @property
    def unwrapped(self) -> Piece:
        """The piece that holds the rows, without what is done to them when they are read."""
        return self


class WrappedPiece(Piece):
    """A piece whose rows are changed when they are read, one by one."""

    piece: Piece

    @property
    def rows(self) -> int:  # type: ignore[override]  # derived here, stored elsewhere
        return self.piece.rows

    @property
    def where(self) -> str:
        return self.piece.where

    def seekable(self, *, scattered: bool) -> bool:
        return self.piece.seekable(scattered=scattered)

    @property
    def in_memory(self) -> bool:
        return self.piece.in_memory

    @property
    def unwrapped(self) -> Piece:
        return self.piece.unwrapped


@dataclass(frozen=True, slots=True)
class TablePiece(Piece):
    """A table in this process."""

    table: pa.Table

    @property
    def rows(self) -> int:  # type: ignore[override]  # derived here, stored elsewhere
        return int(self.table.num_rows)

    @property
    def where(self) -> str:
        return "table"

    def read(self, start: int, stop: int, columns: Sequence[str] | None = None) -> pa.Table:
        return selected(self.table, columns).slice(start, stop - start)

    def seekable(self, *, scattered: bool) -> bool:
        return True

    @property
    def in_memory(self) -> bool:
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """A described data set: the pieces in order, and the columns that they read."""

    schema: pa.Schema
    pieces: tuple[Piece, ...]
    index: tuple[str, ...] = ()
    """Columns that hold a DataFrame's index, and so are left out unless the user names them."""


def rows_of_scan(row_bytes: float) -> int:
    """Rows of a table in a pass over rows of this size."""
    return int(min(SCAN_ROWS, max(1, SCAN_BYTES // max(1.0, row_bytes))))


def in_steps(table: pa.Table) -> Iterator[pa.Table]:
    """A table as the tables of a pass."""
    rows = rows_of_scan(table.nbytes / max(1, table.num_rows))
    for start in range(0, table.num_rows, rows):
        yield table.slice(start, rows)


def selected(table: pa.Table, columns: Sequence[str] | None) -> pa.Table:
    """The table with these columns alone, in this order."""
    return table if columns is None else table.select(list(columns))
