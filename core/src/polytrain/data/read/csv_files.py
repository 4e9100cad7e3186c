"""CSV files, and those with tabs: typed by Arrow in one pass, or in two if their types change.

Arrow infers the types of a stream from the stream's first block. If a later value doesn't fit, each
block is inferred for itself, and a column gets the type of all its blocks. The result is what Arrow
would infer if it held the whole file.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv

from polytrain.data.read.file_pieces import (
    DescribedFile,
    FilePiece,
    current_file,
    describing,
    unreadable,
)
from polytrain.data.read.formats import format_of, open_decompressed
from polytrain.data.read.selection import columns_to_count, refuse_repeated
from polytrain.data.read.text_files import ColumnFacts, TextPiece, rounded
from polytrain.data_errors import SourceError
from polytrain.storage.filesystems import ResolvedPath, find
from polytrain.text.described import numbered

_BLOCKS = (1 << 22, 1 << 26, 1 << 30)
"""Bytes that are parsed at once. A row has to fit in: the next size is tried if one doesn't."""

_MISSING = [*pacsv.ConvertOptions().null_values, "<NA>", "None"]
"""Words for a missing value, as in pandas. In a column of text they are text."""

_DELIMITERS = ",;|\t"


class Layout(NamedTuple):
    """The options that a file is parsed with."""

    block: int
    """Bytes that are parsed at once."""

    delimiter: str
    has_one_column: bool = False
    """With one column, an empty line is a row without a value; otherwise it is nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CsvPiece(TextPiece):
    """A CSV file with a header line."""

    layout: Layout

    def _parsed(self, place: ResolvedPath, schema: pa.Schema) -> Generator[pa.Table, None, None]:
        types = {field.name: field.type for field in schema}
        with _stream(place, self.layout, types) as stream:
            for batch in stream:
                yield pa.Table.from_batches([batch])

    def _check_exact(self, types: Mapping[str, pa.DataType]) -> None:
        _check_exact(self.path, types, self.layout)

    def in_types(self, schema: pa.Schema, constants: Mapping[str, Any]) -> FilePiece:
        # Other files tell whether empty fields, and words such as NA, are text.
        texts = {field.name: field.type for field in schema if pa.types.is_string(field.type)}
        stored = [
            own.with_type(texts.get(own.name, own.type)) if pa.types.is_null(own.type) else own
            for own in self.stored
        ]
        return TextPiece.in_types(replace(self, stored=pa.schema(stored)), schema, constants)


def described(place: str, columns: Sequence[str] | None = None) -> DescribedFile:
    """Count a file's rows and find its columns' types, holding no more than a few blocks of it.

    Raises:
        SourceError: it can't be read; says which line is wrong, where one is.
    """
    with describing(place, _explained):
        for block in _BLOCKS:
            try:
                return _described(place, columns, block)
            except pa.ArrowInvalid as error:
                if "straddling" not in str(error) or block == _BLOCKS[-1]:
                    raise
    raise AssertionError("the last block size either does or raises")


def _described(place: str, columns: Sequence[str] | None, block: int) -> DescribedFile:
    file = current_file(place)
    layout = Layout(block, "\t" if format_of(place) == "tsv" else ",")
    with _stream(file.place, layout) as stream:
        names = stream.schema.names
    layout = layout._replace(has_one_column=len(names) == 1)
    if layout.has_one_column and {*names[0]} & {*_DELIMITERS}:
        problem = _of_another_delimiter(place, layout.delimiter)
        if problem is not None:
            raise SourceError(*problem)
    refuse_repeated(names, repr(place))
    wanted = columns_to_count(columns, names)
    try:
        facts = ColumnFacts(_of_both, wanted)
        with _stream(file.place, layout, dict.fromkeys(wanted)) as stream:
            for batch in stream:
                facts.add(pa.Table.from_batches([batch]))
    except pa.ArrowInvalid:
        # Values further down don't fit what the first ones look like.
        facts = _typed_by_every_block(file.place, wanted, layout)
    # Columns that aren't read have no type.
    schema = pa.schema({**dict.fromkeys(names, pa.null()), **facts.types}.items())
    if any(pa.types.is_binary(kind) for kind in schema.types):
        # Arrow takes bytes for that which are no text.
        raise SourceError(*_explained(place, None))
    floats = {field.name for field in schema if pa.types.is_float64(field.type)}
    _check_exact(place, facts.large & floats, layout)
    piece = CsvPiece(
        path=place,
        rows=facts.rows,
        schema=schema,
        stored=schema,
        large=frozenset(facts.large - floats),
        layout=layout,
        version=file.version,
    )
    return DescribedFile(place=place, schema=schema, missing=facts.missing, pieces=(piece,))


def _typed_by_every_block(place: ResolvedPath, names: list[str], layout: Layout) -> ColumnFacts:
    mixed: set[str] = set()

    def of_both(name: str, one: pa.DataType, other: pa.DataType) -> pa.DataType:
        if other not in (one, pa.null()):
            mixed.add(name)
        return _of_both(name, one, other)

    facts = ColumnFacts(of_both, names)
    with _stream(place, layout, dict.fromkeys(names, pa.string())) as stream:
        for batch in stream:
            facts.add(_inferred(batch))
    for name in mixed:
        if not _fits(place, layout, name, facts.types[name]):
            facts.types[name] = pa.string()
    return facts


def _inferred(block: pa.RecordBatch) -> pa.Table:
    """Some rows, whose values are all text, in the types that Arrow would infer for them."""
    # Written and parsed once more: only Arrow's parser tells what Arrow's parser would make of it.
    sink = pa.BufferOutputStream()
    pacsv.write_csv(block, sink)
    written = sink.getvalue()
    return pacsv.read_csv(
        pa.BufferReader(written),
        parse_options=pacsv.ParseOptions(newlines_in_values=True),
        read_options=pacsv.ReadOptions(block_size=max(1 << 20, written.size)),
        convert_options=pacsv.ConvertOptions(null_values=_MISSING),
    )


def _of_both(name: str, one: pa.DataType, other: pa.DataType) -> pa.DataType:
    """The type for values of both, where there is one; text holds everything."""
    if one == other or pa.types.is_null(other):
        return one
    if {one, other} == {pa.int64(), pa.float64()}:
        return pa.float64()
    if {one, other} == {pa.int64(), pa.bool_()}:
        # 0 and 1 are truth values too; that a column has no other numbers is found out later.
        return pa.bool_()
    if all(pa.types.is_date(kind) or pa.types.is_timestamp(kind) for kind in (one, other)):
        times = [kind for kind in (one, other) if pa.types.is_timestamp(kind)]
        return next((kind for kind in times if kind.unit == "ns"), times[0])
    return pa.string()


def _fits(place: ResolvedPath, layout: Layout, name: str, kind: pa.DataType) -> bool:
    """Whether all values of a column have this type."""
    if pa.types.is_float64(kind) or pa.types.is_string(kind):
        return True
    try:
        with _stream(place, layout, {name: kind}) as stream:
            for _ in stream:
                pass
    except pa.ArrowInvalid:
        return False
    return True


def _check_exact(place: str, names: Collection[str], layout: Layout) -> None:
    """Refuse to read whole numbers as floats that don't hold them."""
    if not names:
        return
    with _stream(find(place), layout, dict.fromkeys(names, pa.string())) as stream:
        for batch in stream:
            for name, column in zip(batch.schema.names, batch.columns, strict=True):
                is_long = pc.match_substring_regex(column, r"^\s*[+-]?[0-9]{16,}\s*$")
                for text in column.filter(is_long).to_pylist():
                    if int(float(text)) != int(text):
                        raise rounded(place, name, text, ", with a letter or the like in it")


@contextmanager
def _stream(
    place: ResolvedPath, layout: Layout, types: Mapping[str, pa.DataType | None] | None = None
) -> Iterator[Any]:
    """The file's rows, with these columns alone; a type of None is inferred from a first block."""
    with (
        open_decompressed(place) as source,
        pacsv.open_csv(
            source,
            read_options=pacsv.ReadOptions(block_size=layout.block),
            parse_options=pacsv.ParseOptions(
                delimiter=layout.delimiter,
                newlines_in_values=True,
                ignore_empty_lines=not layout.has_one_column,
            ),
            convert_options=pacsv.ConvertOptions(
                include_columns=None if types is None else list(types),
                column_types={name: kind for name, kind in (types or {}).items() if kind},
                null_values=_MISSING,
            ),
        ) as stream,
    ):
        yield stream


def _explained(place: str, error: Exception | None) -> tuple[str, str]:
    """Say what is wrong with a file, and in which line if that can be found."""
    # If not even this works, Arrow's message has to do.
    with suppress(pa.ArrowException, OSError, csv.Error):
        with _lines(place) as lines:
            for number, text in enumerate(lines, 1):
                if any("\udc80" <= char <= "\udcff" for char in text):
                    return (
                        f"{place!r} is not UTF-8: line {number} has other bytes",
                        "Convert it to UTF-8, for instance with iconv -f latin1 -t utf-8",
                    )
        delimiter, called = ("\t", "tab") if format_of(place) == "tsv" else (",", "comma")
        problem = _of_another_delimiter(place, delimiter)
        if problem is not None:
            return problem
        with _lines(place) as lines:
            rows = csv.reader(lines, delimiter=delimiter)
            width = len(next(rows, []))
            line = rows.line_num + 1
            for row in rows:
                if row and len(row) != width:
                    fields = numbered(len(row), "field")
                    return (
                        f"{place!r}, line {line}: {fields} where the header has {width}",
                        f"Correct the line; a value with a {called} in it needs quotes",
                    )
                line = rows.line_num + 1
    what = f"{place!r} can't be read: it is not text" if error is None else unreadable(place, error)
    return what, "Replace or remove it"


def _of_another_delimiter(place: str, expected: str) -> tuple[str, str] | None:
    """Say that a file's fields are divided by another character; None if they aren't."""
    with _lines(place) as lines:
        first = [*islice(lines, 2)]
    with suppress(csv.Error):
        if len(next(csv.reader(first, delimiter=expected), [])) > 1:
            return None
        for found in _DELIMITERS.replace(expected, ""):
            widths = [*map(len, csv.reader(first, delimiter=found))]
            if len({*widths}) == 1 and widths[0] > 1:
                return (
                    f"{place!r} has {found!r} between its {widths[0]} columns, where {expected!r} "
                    "is expected",
                    f"Pass pandas.read_csv(…, sep={found!r}), with decimal=',' if its numbers have "
                    "commas, or write the file anew",
                )
    return None


@contextmanager
def _lines(place: str) -> Iterator[io.TextIOWrapper]:
    with (
        open_decompressed(find(place)) as source,
        io.TextIOWrapper(source, "utf-8-sig", errors="surrogateescape", newline="") as lines,
    ):
        yield lines
