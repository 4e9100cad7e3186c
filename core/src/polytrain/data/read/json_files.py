"""JSON Lines files: counted and typed in one pass, and read as a stream.

A value has the type that JSON has for it: text stays text, even if it looks like a time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.json as pajson

from polytrain.data.read.file_pieces import DescribedFile, current_file, describing, unreadable
from polytrain.data.read.formats import open_decompressed
from polytrain.data.read.text_files import ColumnFacts, TextPiece, rounded
from polytrain.data.types.nested import with_parts
from polytrain.data.types.schemas import merged_type, two_types
from polytrain.data_errors import one_line
from polytrain.storage.filesystems import ResolvedPath, find

_BLOCK = 1 << 22
"""Bytes that are parsed at once, or a line if that is longer."""

_ONE_TYPE = "Give the column's values one type"


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonPiece(TextPiece):
    """A file with an object in each line."""

    def _parsed(self, place: ResolvedPath, schema: pa.Schema) -> Generator[pa.Table, None, None]:
        for block in _blocks(place):
            yield _parsed(block, schema)

    def _check_exact(self, types: Mapping[str, pa.DataType]) -> None:
        _check_exact(self.path, types)


def described(place: str, columns: Sequence[str] | None = None) -> DescribedFile:
    """Count a file's rows and find its columns' types, holding no more than a block of it.

    Raises:
        SourceError: it can't be read; says which line is wrong, where one is.
    """
    facts = ColumnFacts(
        partial(merged_type, places=(f"some rows of {place!r}", "others"), remedy=_ONE_TYPE)
    )
    names: dict[str, pa.DataType] = {}
    with describing(place, _explained):
        file = current_file(place)
        for block in _blocks(file.place):
            table = _inferred(block, columns)
            names |= dict.fromkeys(table.column_names, pa.null())
            wanted = table.column_names if columns is None else [*columns]
            facts.add(table.select([name for name in wanted if name in table.column_names]))
    _check_exact(
        place, {name: facts.types[name] for name in facts.large if _holds_floats(facts.types[name])}
    )
    # Columns that aren't read have no type.
    schema = pa.schema({**names, **facts.types}.items())
    piece = JsonPiece(
        path=place,
        rows=facts.rows,
        schema=schema,
        stored=schema,
        large=frozenset(facts.large),
        version=file.version,
    )
    return DescribedFile(place=place, schema=schema, missing=facts.missing, pieces=(piece,))


def _blocks(place: ResolvedPath) -> Iterator[bytes]:
    """Yield the file in parts that consist of whole lines."""
    held: list[bytes] = []
    with open_decompressed(place) as source:
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


def _inferred(block: bytes, columns: Collection[str] | None) -> pa.Table:
    """Some lines in the types that their values have.

    Columns that aren't read may come back as null.
    """
    block.decode()  # Arrow doesn't look whether it is UTF-8.
    try:
        table = _parsed(block, None)
    except pa.ArrowInvalid:
        if columns is None:
            raise
        with suppress(AttributeError, ValueError):
            block = _without_values(block, columns)
        table = _parsed(block, None)
    plain = pa.schema([found.with_type(_without_times(found.type)) for found in table.schema])
    return table if plain == table.schema else _parsed(block, plain)


def _without_values(block: bytes, columns: Collection[str]) -> bytes:
    """The lines with null in other columns than these, whose values may have several types.

    Raises:
        AttributeError, ValueError: a line isn't an object.
    """
    rows = [json.loads(line) for line in block.splitlines() if line.strip()]
    lines = (
        {name: value if name in columns else None for name, value in row.items()} for row in rows
    )
    return "\n".join(map(json.dumps, lines)).encode()


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
    return pa.string() if pa.types.is_timestamp(kind) else with_parts(kind, _without_times)


def _holds_floats(kind: pa.DataType) -> bool:
    return bool(pa.types.is_float64(kind)) or any(
        _holds_floats(kind.field(number).type) for number in range(kind.num_fields)
    )


def _check_exact(place: str, types: Mapping[str, pa.DataType]) -> None:
    """Refuse to read whole numbers as floats that don't hold them."""
    if not types:
        return
    for block in _blocks(find(place)):
        for line in filter(None, map(bytes.strip, block.splitlines())):
            row = json.loads(line)
            for name, kind in types.items():
                for number in _numbers_as_floats(row.get(name), kind):
                    if int(float(number)) != number:
                        raise rounded(place, name, number, "")


def _numbers_as_floats(value: Any, kind: pa.DataType) -> Iterator[int]:
    """Yield the whole numbers of a value that its type has as floats."""
    if isinstance(value, list):
        for each in value:
            yield from _numbers_as_floats(each, kind.value_type)
    elif isinstance(value, dict):
        for field in kind:
            yield from _numbers_as_floats(value.get(field.name), field.type)
    elif isinstance(value, int) and not isinstance(value, bool) and pa.types.is_floating(kind):
        yield value


def _explained(place: str, error: Exception) -> tuple[str, str]:
    """Say what is wrong with a file, and in which line if that can be found."""
    number = 0
    try:
        for block in _blocks(find(place)):
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
        found = two_types(name, one, other, (f"some rows of {place!r}", "others"), _ONE_TYPE)
        return found.what, found.remedy
    return unreadable(place, error), "Replace or remove it"
