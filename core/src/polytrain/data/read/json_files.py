"""JSON Lines files: counted and typed in one pass, and read as a stream.

A value has the type that JSON has for it: text stays text, even if it looks like a time.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pajson

from polytrain.data.read.compression import open_decompressed
from polytrain.data.read.csv_types import EXACT
from polytrain.data.read.file_version import FileVersion, version_of
from polytrain.data.read.pieces import Piece
from polytrain.data.read.streamed_rows import StreamedPiece
from polytrain.data.types.missing import Missing, found_missing
from polytrain.data.types.schemas import columns_to_count, subschema, unified_type
from polytrain.data_errors import SourceError, one_line
from polytrain.storage.filesystems import find

_BLOCK = 1 << 22
"""Bytes that are parsed at once, or a line if that is longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonPiece(StreamedPiece):
    """A file with an object in each line."""

    stored: pa.Schema
    """The file's own columns and types, which may be narrower than those of the data set."""

    def _parsed(self, columns: Sequence[str]) -> Generator[pa.Table, None, None]:
        own = subschema(self.stored, list(columns))
        yield own.empty_table()
        for block in _blocks(self.path):
            yield _parsed(block, own)


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonFile:
    """What is known of a JSON Lines file once it was read."""

    place: str
    schema: pa.Schema
    rows: int
    missing: frozenset[Missing]
    """Columns in which values are missing."""

    large: frozenset[str]
    """Columns with numbers that no 64-bit float may hold."""

    version: FileVersion

    def pieces(self, schema: pa.Schema, constants: Mapping[str, Any]) -> Iterator[Piece]:
        """The file as one piece, if it has rows, in the types of this schema.

        Raises:
            SourceError: a whole number would be rounded.
        """
        wider = {name for name in self.large if name in schema.names}
        wider = {name for name in wider if schema.field(name).type != self.schema.field(name).type}
        _check_exact(self.place, wider)
        if self.rows:
            yield JsonPiece(
                path=self.place,
                rows=self.rows,
                schema=schema,
                stored=self.schema,
                constants=constants,
                version=self.version,
            )


def described(
    place: str, columns: Sequence[str] | None = None, *, elsewhere: Collection[str] = ()
) -> JsonFile:
    """Count a file's rows and find its columns' types, holding no more than a block of it.

    Args:
        place: a path or an address.
        columns: which columns; all by default.
        elsewhere: columns that the file need not have.

    Raises:
        SourceError: it can't be read; says which line is wrong, where one is.
    """
    facts = _Facts(place)
    try:
        version = version_of(find(place))
        for block in _blocks(place):
            facts.add(_inferred(block))
    except PermissionError as error:
        raise SourceError(f"{place!r} can't be read: {one_line(error)}", "Make it readable") from (
            error
        )
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise SourceError(*_explained(place, error)) from error
    wanted = columns_to_count(columns, [*facts.types], elsewhere=elsewhere, of=repr(place))
    floats = {name for name in wanted if _holds_floats(facts.types[name])}
    _check_exact(place, facts.large & floats)
    return JsonFile(
        place=place,
        schema=pa.schema([(name, facts.types[name]) for name in wanted]),
        rows=facts.rows,
        missing=frozenset(facts.missing),
        large=frozenset(facts.large - floats),
        version=version,
    )


class _Facts:
    """What is noticed of columns while their file is read once."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._found: set[Missing] = set()
        self._rows_with: Counter[str] = Counter()
        self.rows = 0
        self.types: dict[str, pa.DataType] = {}
        self.large: set[str] = set()
        """Columns with numbers of `EXACT` or more."""

    def add(self, block: pa.Table) -> None:
        """Some more rows, in the types that they have by themselves."""
        self.rows += block.num_rows
        self._found |= found_missing(block)
        for found, column in zip(block.schema, block.columns, strict=True):
            before = self.types.get(found.name, pa.null())
            both = unified_type(before, found.type)
            if both is None:
                raise SourceError(
                    f"the column {found.name!r} is {before} in some rows of {self._place!r} and "
                    f"{found.type} in others",
                    "Give the column's values one type",
                )
            self.types[found.name] = both
            self._rows_with[found.name] += block.num_rows
            if _has_large(column):
                self.large.add(found.name)

    @property
    def missing(self) -> set[Missing]:
        """Columns in which values are missing: a key may be, in any line."""
        return self._found | {name for name in self.types if self._rows_with[name] < self.rows}


def _blocks(place: str) -> Iterator[bytes]:
    """The file in parts that consist of whole lines."""
    where = find(place)
    held: list[bytes] = []
    with open_decompressed(where) as source:
        while read := source.read(_BLOCK):
            end = read.rfind(b"\n") + 1
            if end:
                yield from _filled(b"".join([*held, read[:end]]))
                held = []
            held.append(read[end:])
    yield from _filled(b"".join(held))


def _filled(block: bytes) -> Iterator[bytes]:
    if block.strip():
        yield block


def _inferred(block: bytes) -> pa.Table:
    """Some lines in the types that their values have."""
    block.decode()  # Arrow doesn't look whether it is UTF-8.
    table = _parsed(block, None)
    plain = pa.schema([found.with_type(_without_times(found.type)) for found in table.schema])
    return table if plain == table.schema else _parsed(block, plain)


def _parsed(block: bytes, schema: pa.Schema | None) -> pa.Table:
    # The reader takes a block for the whole, so nothing lies across two of them.
    return pajson.read_json(
        pa.BufferReader(block),
        read_options=pajson.ReadOptions(block_size=len(block) + 1, use_threads=False),
        parse_options=pajson.ParseOptions(
            explicit_schema=schema,
            unexpected_field_behavior="infer" if schema is None else "ignore",
        ),
    )


def _without_times(kind: pa.DataType) -> pa.DataType:
    """The type, with text where Arrow has seen times in it."""
    if pa.types.is_timestamp(kind):
        return pa.string()
    if pa.types.is_list(kind):
        return pa.list_(_without_times(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([found.with_type(_without_times(found.type)) for found in kind])
    return kind


def _holds_floats(kind: pa.DataType) -> bool:
    return bool(pa.types.is_float64(kind)) or any(
        _holds_floats(kind.field(number).type) for number in range(kind.num_fields)
    )


def _has_large(column: pa.ChunkedArray) -> bool:
    kind = column.type
    if pa.types.is_list(kind):
        return _has_large(pc.list_flatten(column))
    if pa.types.is_struct(kind):
        return any(_has_large(pc.struct_field(column, number)) for number in range(kind.num_fields))
    if not (pa.types.is_int64(kind) or pa.types.is_float64(kind)):
        return False
    ends = pc.min_max(column)
    return any(end.is_valid and abs(end.as_py()) >= EXACT for end in ends.values())


def _check_exact(place: str, names: Collection[str]) -> None:
    """Refuse to read whole numbers as floats that don't hold them."""
    if not names:
        return
    for block in _blocks(place):
        for line in filter(None, map(bytes.strip, block.splitlines())):
            row = json.loads(line)
            for name in names:
                for number in _whole_numbers(row.get(name)):
                    if int(float(number)) != number:
                        raise SourceError(
                            f"{place!r}: the column {name!r} is read as float64, which would round "
                            f"{number}: its other values have fractions, or don't fit 64 bits",
                            "Write the column as text, or leave it out with columns=[…]",
                        )


def _whole_numbers(value: Any) -> Iterator[int]:
    if isinstance(value, list | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _whole_numbers(each)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield value


def _explained(place: str, error: Exception) -> tuple[str, str]:
    """What is wrong with a file, and in which line if that can be found."""
    number = 0
    try:
        for block in _blocks(place):
            for line in block.splitlines():
                number += 1
                if line.strip() and not isinstance(json.loads(line.decode("utf-8-sig")), dict):
                    return (
                        f"{place!r}, line {number}: it isn't an object",
                        "Write an object in each line, as in {…}, without a list around them",
                    )
    except UnicodeDecodeError:
        return f"{place!r} is not UTF-8: line {number} has other bytes", "Convert it to UTF-8"
    except ValueError as wrong:
        return f"{place!r}, line {number}: {one_line(wrong)}", "Write an object in each line"
    except OSError:
        # What was raised first says more.
        pass
    changed = re.search(r"Column\(/(.*)\) changed from (\w+) to (\w+)", str(error))
    if changed:
        name, one, other = changed.groups()
        return (
            f"the column {name!r} is {one} in some rows of {place!r} and {other} in others",
            "Give the column's values one type",
        )
    return f"{place!r} can't be read: {one_line(error)}", "Replace or remove it"
