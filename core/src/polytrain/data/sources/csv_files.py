"""CSV files: counted and typed in one pass, and read as a stream."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.csv as pacsv

from polytrain.common.data_errors import ReadError, SourceError, one_line
from polytrain.data.sources.csv_types import candidate, types_of_block
from polytrain.data.sources.pieces import Piece
from polytrain.data.sources.schemas import chosen, conformed, refuse_repeated, subschema
from polytrain.storage.filesystems import find

_BLOCKS = (1 << 22, 1 << 26, 1 << 30)
"""Bytes that are parsed at once. A row has to fit in: the next size is tried if one doesn't."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CsvPiece(Piece):
    """A CSV file with a header line."""

    path: str
    rows: int
    schema: pa.Schema
    """The types that the driver inferred from all files, so that all ranks agree on them."""

    constants: Mapping[str, Any] = field(default_factory=dict)
    """Columns that aren't in the file, with the value that all its rows have."""

    block: int = _BLOCKS[0]
    """Bytes that are parsed at once."""

    @property
    def where(self) -> str:
        return repr(self.path)

    def read(self, start: int, stop: int, columns: Sequence[str] | None = None) -> pa.Table:
        schema = subschema(self.schema, self.schema.names if columns is None else list(columns))
        stored = [name for name in schema.names if name not in self.constants]
        if not stored:
            return conformed(pa.table({"": pa.nulls(stop - start)}), schema, "", self.constants)
        types = {name: self.schema.field(name).type for name in stored}
        try:
            with _stream(self.path, self.block, types) as stream:
                table = pa.Table.from_batches(self._cut(stream, start, stop), stream.schema)
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise ReadError(f"{self.where} can't be read: {one_line(error)}") from error
        return conformed(table, schema, self.where, self.constants)

    def seekable(self, *, scattered: bool) -> bool:
        # Every row before the first one that is wanted has to be parsed.
        return False

    def _cut(self, stream: Any, start: int, stop: int) -> Iterator[pa.RecordBatch]:
        first = 0
        for batch in stream:
            if first >= stop and batch.num_rows:
                break
            skipped = max(start - first, 0)
            if skipped < batch.num_rows:
                yield batch.slice(skipped, stop - first - skipped)
            first += batch.num_rows
            if first >= stop < self.rows:
                return
        if first < stop or (stop == self.rows and first != stop):
            raise ReadError(
                f"{self.where} has {'fewer' if first < stop else 'more'} than {self.rows} rows: "
                "the file has changed since the run began. Give a run files that stay as they are"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CsvFile:
    """What is known of a CSV file once it was read."""

    place: str
    schema: pa.Schema
    rows: int
    block: int

    def pieces(self, schema: pa.Schema, constants: Mapping[str, Any]) -> Iterator[Piece]:
        """The file as one piece, if it has rows, in the types of this schema."""
        if self.rows:
            yield CsvPiece(
                path=self.place,
                rows=self.rows,
                schema=schema,
                constants=constants,
                block=self.block,
            )


def described(place: str, columns: Sequence[str] | None = None) -> CsvFile:
    """Count a file's rows and find its columns' types, holding no more than a few blocks of it.

    Args:
        place: a path or an address.
        columns: which columns; all by default.

    Raises:
        SourceError: it can't be read; says which line is wrong, where one is.
    """
    try:
        for block in _BLOCKS:
            try:
                return _described(place, columns, block)
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


def _described(place: str, columns: Sequence[str] | None, block: int) -> CsvFile:
    with _stream(place, block) as stream:
        names = stream.schema.names
    refuse_repeated(names, repr(place))
    # Rows are counted even if none of their columns is asked for.
    wanted = (
        chosen(columns, names, of=repr(place))
        if columns
        else names[: None if columns is None else 1]
    )
    try:
        schema, rows = _typed_by_first_block(place, wanted, block)
    except pa.ArrowInvalid:
        # Values further down don't fit what the first ones look like.
        schema, rows = _typed_by_every_block(place, wanted, block)
    if any(pa.types.is_binary(found.type) for found in schema):
        # What Arrow takes bytes for that are no text.
        raise SourceError(*_explained(place, None))
    return CsvFile(place=place, schema=schema, rows=rows, block=block)


def _typed_by_first_block(place: str, names: list[str], block: int) -> tuple[pa.Schema, int]:
    with _stream(place, block, dict.fromkeys(names)) as stream:
        return stream.schema, sum(batch.num_rows for batch in stream)


def _typed_by_every_block(place: str, names: list[str], block: int) -> tuple[pa.Schema, int]:
    """The types that fit all values, of which no more than one block is in memory at once."""
    kinds: dict[str, set[pa.DataType]] = {name: set() for name in names}
    rows = 0
    with _stream(place, block, dict.fromkeys(names, pa.string())) as stream:
        for batch in stream:
            rows += batch.num_rows
            for name, kind in zip(names, types_of_block(batch), strict=True):
                kinds[name].add(kind)
    types = {name: _settled(place, name, found, block) for name, found in kinds.items()}
    return pa.schema(types.items()), rows


def _settled(place: str, name: str, kinds: set[pa.DataType], block: int) -> pa.DataType:
    kind, is_certain = candidate(kinds)
    if not is_certain:
        try:
            with _stream(place, block, {name: kind}) as stream:
                for _ in stream:
                    pass
        except pa.ArrowInvalid:
            return pa.string()
    return kind


@contextmanager
def _stream(
    place: str, block: int, types: Mapping[str, pa.DataType | None] | None = None
) -> Iterator[Any]:
    """The file's rows, with these columns alone; a type of None is inferred from a first block."""
    where = find(place)
    with (
        where.filesystem.open_input_stream(where.path) as source,
        pacsv.open_csv(
            source,
            read_options=pacsv.ReadOptions(block_size=block),
            parse_options=pacsv.ParseOptions(newlines_in_values=True),
            convert_options=pacsv.ConvertOptions(
                include_columns=None if types is None else list(types),
                column_types={name: kind for name, kind in (types or {}).items() if kind},
            ),
        ) as stream,
    ):
        yield stream


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
            rows = csv.reader(lines)
            width = len(next(rows, []))
            line = rows.line_num + 1
            for row in rows:
                if row and len(row) != width:
                    return (
                        f"{place!r}, line {line}: {len(row)} field(s) where the header has {width}",
                        "Correct the line; a value with a comma in it needs quotes",
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
        where.filesystem.open_input_stream(where.path) as source,
        io.TextIOWrapper(source, "utf-8-sig", errors="surrogateescape", newline="") as lines,
    ):
        yield lines
