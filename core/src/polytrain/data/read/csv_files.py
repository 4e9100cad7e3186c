"""CSV files, and those with tabs: counted and typed in one pass, and read as a stream."""

from __future__ import annotations

import csv
import io
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.csv as pacsv

from polytrain.data.read.compression import open_decompressed
from polytrain.data.read.csv_types import (
    MISSING,
    ColumnFacts,
    candidate,
    first_rounded,
    typed_block,
)
from polytrain.data.read.expansion import format_of
from polytrain.data.read.file_version import FileVersion, version_of
from polytrain.data.read.pieces import Piece
from polytrain.data.read.streamed_rows import StreamedPiece
from polytrain.data.types.missing import Missing
from polytrain.data.types.schemas import columns_to_count, refuse_repeated
from polytrain.data_errors import SourceError, one_line
from polytrain.storage.filesystems import find

_BLOCKS = (1 << 22, 1 << 26, 1 << 30)
"""Bytes that are parsed at once. A row has to fit in: the next size is tried if one doesn't."""


class Layout(NamedTuple):
    """How a file is read."""

    block: int
    """Bytes that are parsed at once."""

    has_one_column: bool = False
    """Then an empty line is a row without a value; otherwise it is nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CsvPiece(StreamedPiece):
    """A CSV file with a header line."""

    layout: Layout

    def _parsed(self, columns: Sequence[str]) -> Generator[pa.Table, None, None]:
        types = {name: self.schema.field(name).type for name in columns}
        with _stream(self.path, self.layout, types) as stream:
            yield stream.schema.empty_table()
            for batch in stream:
                yield pa.Table.from_batches([batch])


@dataclass(frozen=True, slots=True, kw_only=True)
class CsvFile:
    """What is known of a CSV file once it was read."""

    place: str
    schema: pa.Schema
    rows: int
    layout: Layout
    missing: frozenset[Missing]
    """Columns in which values are missing."""

    large: frozenset[str]
    """Columns with whole numbers that no 64-bit float may hold."""

    version: FileVersion

    def pieces(self, schema: pa.Schema, constants: Mapping[str, Any]) -> Iterator[Piece]:
        """The file as one piece, if it has rows, in the types of this schema.

        Raises:
            SourceError: a whole number would be rounded.
        """
        rounded = {name for name in self.large if name in schema.names}
        _check_exact(
            self.place,
            [name for name in rounded if pa.types.is_float64(schema.field(name).type)],
            self.layout,
        )
        if self.rows:
            yield CsvPiece(
                path=self.place,
                rows=self.rows,
                schema=schema,
                constants=constants,
                layout=self.layout,
                version=self.version,
            )


def described(
    place: str, columns: Sequence[str] | None = None, *, elsewhere: Collection[str] = ()
) -> CsvFile:
    """Count a file's rows and find its columns' types, holding no more than a few blocks of it.

    Args:
        place: a path or an address.
        columns: which columns; all by default.
        elsewhere: columns that the file need not have.

    Raises:
        SourceError: it can't be read; says which line is wrong, where one is.
    """
    try:
        for block in _BLOCKS:
            try:
                return _described(place, columns, elsewhere, block)
            except pa.ArrowInvalid as error:
                if "straddling" not in str(error) or block == _BLOCKS[-1]:
                    raise
    except PermissionError as error:
        raise SourceError(f"{place!r} can't be read: {one_line(error)}", "Make it readable") from (
            error
        )
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise SourceError(*_explained(place, error)) from error
    raise AssertionError("the last block size either does or raises")


def _described(
    place: str, columns: Sequence[str] | None, elsewhere: Collection[str], block: int
) -> CsvFile:
    version = version_of(find(place))
    with _stream(place, Layout(block)) as stream:
        names = stream.schema.names
    layout = Layout(block, has_one_column=len(names) == 1)
    refuse_repeated(names, repr(place))
    wanted = columns_to_count(columns, names, elsewhere=elsewhere, of=repr(place))
    try:
        schema, facts = _typed_by_first_block(place, wanted, layout)
    except pa.ArrowInvalid:
        # Values further down don't fit what the first ones look like.
        schema, facts = _typed_by_every_block(place, wanted, layout)
    if any(pa.types.is_binary(found.type) for found in schema):
        # What Arrow takes bytes for that are no text.
        raise SourceError(*_explained(place, None))
    floats = [field.name for field in schema if pa.types.is_float64(field.type)]
    _check_exact(place, [name for name in floats if name in facts.large], layout)
    return CsvFile(
        place=place,
        schema=schema,
        rows=facts.rows,
        layout=layout,
        missing=frozenset(facts.missing),
        large=frozenset(facts.large.difference(floats)),
        version=version,
    )


def _typed_by_first_block(
    place: str, names: list[str], layout: Layout
) -> tuple[pa.Schema, ColumnFacts]:
    facts = ColumnFacts()
    with _stream(place, layout, dict.fromkeys(names)) as stream:
        for batch in stream:
            facts.add(batch)
        return stream.schema, facts


def _typed_by_every_block(
    place: str, names: list[str], layout: Layout
) -> tuple[pa.Schema, ColumnFacts]:
    """The types that fit all values, of which no more than one block is in memory at once."""
    kinds: dict[str, set[pa.DataType]] = {name: set() for name in names}
    facts = ColumnFacts()
    with _stream(place, layout, dict.fromkeys(names, pa.string())) as stream:
        for batch in stream:
            typed = typed_block(batch)
            facts.add(typed)
            for name, kind in zip(names, typed.schema.types, strict=True):
                kinds[name].add(kind)
    types = {name: _settled(place, name, found, layout) for name, found in kinds.items()}
    return pa.schema(types.items()), facts


def _check_exact(place: str, names: list[str], layout: Layout) -> None:
    """Refuse to read whole numbers as floats that don't hold them."""
    if not names:
        return
    with _stream(place, layout, dict.fromkeys(names, pa.string())) as stream:
        for batch in stream:
            rounded = first_rounded(batch)
            if rounded is not None:
                name, number = rounded
                raise SourceError(
                    f"{place!r}: the column {name!r} is read as float64, which would round "
                    f"{number}: its other values have fractions, or don't fit 64 bits",
                    "Write the column as text, with a letter or the like in it, or leave it out "
                    "with columns=[…]",
                )


def _settled(place: str, name: str, kinds: set[pa.DataType], layout: Layout) -> pa.DataType:
    kind, is_certain = candidate(kinds)
    if not is_certain:
        try:
            with _stream(place, layout, {name: kind}) as stream:
                for _ in stream:
                    pass
        except pa.ArrowInvalid:
            return pa.string()
    return kind


@contextmanager
def _stream(
    place: str,
    layout: Layout,
    types: Mapping[str, pa.DataType | None] | None = None,
) -> Iterator[Any]:
    """The file's rows, with these columns alone; a type of None is inferred from a first block."""
    where = find(place)
    with (
        open_decompressed(where) as source,
        pacsv.open_csv(
            source,
            read_options=pacsv.ReadOptions(block_size=layout.block),
            parse_options=pacsv.ParseOptions(
                delimiter=_delimiter(place),
                newlines_in_values=True,
                ignore_empty_lines=not layout.has_one_column,
            ),
            convert_options=pacsv.ConvertOptions(
                include_columns=None if types is None else list(types),
                column_types={name: kind for name, kind in (types or {}).items() if kind},
                null_values=MISSING,
            ),
        ) as stream,
    ):
        yield stream


def _delimiter(place: str) -> str:
    return "\t" if format_of(place) == "tsv" else ","


def _explained(place: str, error: Exception | None) -> tuple[str, str]:
    """What is wrong with a file, and in which line if that can be found."""
    try:
        with _lines(place) as lines:
            for number, text in enumerate(lines, 1):
                if any("\udc80" <= char <= "\udcff" for char in text):
                    return (
                        f"{place!r} is not UTF-8: line {number} has other bytes",
                        "Convert it to UTF-8, for instance with iconv -f latin1 -t utf-8",
                    )
        with _lines(place) as lines:
            rows = csv.reader(lines, delimiter=_delimiter(place))
            width = len(next(rows, []))
            line = rows.line_num + 1
            comma = "comma" if _delimiter(place) == "," else "tab"
            for row in rows:
                if row and len(row) != width:
                    return (
                        f"{place!r}, line {line}: {len(row)} field(s) where the header has {width}",
                        f"Correct the line; a value with a {comma} in it needs quotes",
                    )
                line = rows.line_num + 1
    except (pa.ArrowException, OSError, csv.Error):
        # Not even this works: what Arrow says has to do.
        pass
    what = "it is not text" if error is None else one_line(error)
    return f"{place!r} can't be read: {what}", "Replace or remove it"


@contextmanager
def _lines(place: str) -> Iterator[io.TextIOWrapper]:
    where = find(place)
    with (
        open_decompressed(where) as source,
        io.TextIOWrapper(source, "utf-8-sig", errors="surrogateescape", newline="") as lines,
    ):
        yield lines
