"""Files of text, which are typed in one pass and read from their start: CSV and JSON Lines."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from polytrain.data.read.file_pieces import CurrentFile, FilePiece
from polytrain.data.read.selection import subschema
from polytrain.data.types.plain import Missing, found_missing
from polytrain.data_errors import ReadError, SourceError
from polytrain.storage.filesystems import ResolvedPath
from polytrain.text.described import numbered

_EXACT = 2**53
"""A 64-bit float holds every whole number up to here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPiece(FilePiece):
    """A file of text: to read a row, every row before it has to be parsed."""

    stored: pa.Schema
    """The file's own columns and types."""

    large: frozenset[str]
    """Columns with whole numbers that a 64-bit float may not hold."""

    @abstractmethod
    def _parsed(self, place: ResolvedPath, schema: pa.Schema) -> Generator[pa.Table, None, None]:
        """Parse these columns of the file from its start, a part at a time."""

    @abstractmethod
    def _check_exact(self, types: Mapping[str, pa.DataType]) -> None:
        """Refuse to read whole numbers as floats that don't hold them.

        Args:
            types: the types in which columns are read.
        """

    def in_types(self, schema: pa.Schema, constants: Mapping[str, Any]) -> FilePiece:
        large = [name for name in self.large if name in schema.names]
        types = {name: schema.field(name).type for name in large}
        self._check_exact(
            {name: kind for name, kind in types.items() if kind != self.stored.field(name).type}
        )
        return replace(self, schema=schema, constants=constants)

    def _stored(
        self, file: CurrentFile, rows: range, columns: Sequence[str], *, at_once: bool
    ) -> Iterator[pa.Table]:
        schema = subschema(self.stored, columns)
        # The rows that are wanted may be none.
        yield schema.empty_table()
        with closing(self._parsed(file.place, schema)) as parts:
            yield from cut(parts, rows.start, rows.stop, rows=self.rows, where=self.where)

    def seekable(self, *, scattered: bool) -> bool:
        return False


class ColumnFacts:
    """Collects what is known of a file's columns while the file is read once.

    Args:
        unified: returns the type of a column whose name, and whose types in two blocks are given.
        names: of columns that are known before the first block.
    """

    def __init__(
        self,
        unified: Callable[[str, pa.DataType, pa.DataType], pa.DataType],
        names: Iterable[str] = (),
    ) -> None:
        self._unified = unified
        self._found: set[Missing] = set()
        self._rows_with: Counter[str] = Counter()
        self.rows = 0
        self.types = dict.fromkeys(names, pa.null())
        self.large: set[str] = set()
        """Columns with numbers of `_EXACT` or more."""

    def add(self, block: pa.Table) -> None:
        """Add some more rows, in the types that they have by themselves."""
        self.rows += block.num_rows
        self._found |= found_missing(block)
        for found, column in zip(block.schema, block.columns, strict=True):
            before = self.types.get(found.name, pa.null())
            self.types[found.name] = (
                found.type
                if pa.types.is_null(before)
                else self._unified(found.name, before, found.type)
            )
            self._rows_with[found.name] += block.num_rows
            if _has_large(column):
                self.large.add(found.name)

    @property
    def missing(self) -> frozenset[Missing]:
        """Columns in which values are missing; a block may lack a column."""
        absent = {name for name in self.types if self._rows_with[name] < self.rows}
        return frozenset(self._found | absent)


def _has_large(column: pa.ChunkedArray) -> bool:
    kind = column.type
    if pa.types.is_list(kind):
        return _has_large(pc.list_flatten(column))
    if pa.types.is_struct(kind):
        return any(_has_large(pc.struct_field(column, number)) for number in range(kind.num_fields))
    if not (pa.types.is_int64(kind) or pa.types.is_float64(kind)):
        return False
    ends = pc.min_max(column)
    return any(end.is_valid and abs(end.as_py()) >= _EXACT for end in ends.values())


def rounded(place: str, name: str, number: Any, way: str) -> SourceError:
    """The error of a whole number in a column of floats that would round it."""
    return SourceError(
        f"{place!r}: the column {name!r} is read as float64, which would round {number}: its other "
        "values have fractions, or don't fit 64 bits",
        f"Write the column as text{way}, or leave it out with columns=[…]",
    )


def cut(
    parts: Iterable[pa.Table], start: int, stop: int, *, rows: int, where: str
) -> Iterator[pa.Table]:
    """Yield the rows from `start` to `stop`, and read no further than needed.

    Args:
        rows: number of rows that the file had when the run began.

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
            f"{where} has {'fewer' if first < stop else 'more'} than {numbered(rows, 'row')}: "
            "the file has changed since the run began. Give a run files that stay as they are"
        )
