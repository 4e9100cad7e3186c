"""Digests that identify a data set.

Files are identified by their paths, sizes and times of modification, and by their content if they
are on a local file system; tables in memory by their rows (large ones by their sums and a sample),
pipelines by their steps, and everything else by its kind, its types and its number of rows.
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from polytrain.data.plan.position import (
    COLUMNS,
    CONTENTS,
    MIX,
    NAMES,
    ORDER,
    ORDER_WITHOUT_NAMES,
    ROWS,
    SAMPLES,
    STEPS,
    VERSIONS,
    VERSIONS_WITHOUT_NAMES,
    of_source,
)
from polytrain.data.read.describe import Source
from polytrain.data.read.file_pieces import FilePiece
from polytrain.data.read.pieces import Piece, TablePiece
from polytrain.data.shards.rows import PieceRows
from polytrain.data.types.schemas import widened
from polytrain.storage.filesystems import ResolvedPath, find
from polytrain.text.secret_names import HIDDEN, without_credentials

_WHOLE_BYTES = 64 << 20
"""Tables and files up to this size are hashed whole, in a few tenths of a second at most."""

_SAMPLED_ROWS = 1000

_BLOCK_BYTES = 1 << 16
_SAMPLED_BLOCKS = 16
"""Blocks of larger files that are hashed, of all together."""

_SAMPLED_ITEMS = 8
"""Sampled rows of data sets whose rows are read one by one, which may take long."""

_MOST_COLUMNS = 256
"""Columns with a digest. More aren't looked at: digests are part of every checkpoint."""

_DIGITS = 16

_OF_SIGNATURES = re.compile(
    r"(?:x-(?:amz|goog)-[^=]*|s[eiprtv]|sip|spr|sk(?:e|oid|s|t|tid|v)|expires|policy|key-pair-id"
    r"|awsaccesskeyid|googleaccessid)=",
    re.IGNORECASE,
)
"""Options of signed addresses besides the signature: of S3, CloudFront, Google and Azure."""


def fingerprint(source: Source, digests: Mapping[str, str]) -> str:
    """Return one digest that identifies a data set. Transforms make no difference."""
    pieces = [piece.unwrapped for piece in source.pieces]
    rows = [(_lasting(getattr(piece, "path", piece.where)), piece.rows) for piece in pieces]
    facts = str(source.schema.remove_metadata()), sorted(digests.items()), rows
    return _digest(facts, digits=None)


def facts(source: Source, digests: Mapping[str, str]) -> dict[str, str]:
    """Return what a run's record has of a data set, for `position.differences`."""
    rows = {} if source.info.num_rows is None else {ROWS: str(source.info.num_rows)}
    return {**rows, COLUMNS: _digest([str(source.schema.remove_metadata())]), **digests}


def digests(source: Source) -> dict[str, str]:
    """Return digests that tell a data set from others with as many rows, by what they are of.

    They depend neither on the columns that are read nor on transforms.
    """
    if source.stream is not None:
        return {STEPS: _digest(_steps(source.stream))}
    if source.mix is not None:
        mixed = source.mix.mixture.rows, source.mix.mixture.parts
        found = {MIX: _digest([*source.mix.pieces, *mixed, source.info.num_rows])}
        for name, each in source.sources():
            found |= of_source(name, digests(each))
        return found
    pieces = [piece.unwrapped for piece in source.pieces]
    files = {
        _lasting(path): tuple(getattr(piece, "version", ()))
        for piece in pieces
        if (path := getattr(piece, "path", None)) is not None
    }
    if files:
        paths = [_lasting(getattr(piece, "path", "")) for piece in pieces]
        return {**_digests_of_files(paths, files), **_digests_of_contents(pieces)}
    if len(pieces) == 1 and isinstance(pieces[0], TablePiece):
        table = pieces[0].table
        size = table.nbytes
        # The size depends on the columns that are read: a sample isn't compared with the whole.
        what = "column {!r}" if size <= _WHOLE_BYTES else "column {!r} (its sum, or a sample)"
        return {
            what.format(name): _digest(_facts_of_column(table.select([name]), size))
            for name in sorted(table.column_names)[:_MOST_COLUMNS]
        }
    return {}


def digests_of_sample(source: Source) -> dict[str, str]:
    """Return a digest of some rows of a data set that has no other digests.

    They are read twice. If they differ, items are drawn at random, and there is no digest.

    Raises:
        ReadError: one of them can't be read.
    """
    if source.stream is not None or digests(source):
        return {}
    rows = PieceRows(source.pieces, source.schema)
    last = sum(piece.rows for piece in source.pieces) - 1
    places = sorted(set(np.linspace(0, last, _SAMPLED_ITEMS, dtype=np.int64).tolist()))
    once, again = (
        _digest(_facts_of_column(table.select([name]), 0) for name in sorted(table.column_names))
        for table in (pa.concat_tables(rows.take(places)) for _ in range(2))
    )
    return {"sampled rows": once} if once == again else {}


def _lasting(path: Any) -> str:
    """Return a path, or an address without what is renewed: passwords, signatures, their times."""
    shown = without_credentials(str(path))
    if shown == path:
        return shown
    place, _, options = shown.partition("?")
    kept = [
        option
        for option in options.split("&")
        if not (option.endswith(f"={HIDDEN}") or _OF_SIGNATURES.match(option))
    ]
    return "?".join([place, *filter(None, ["&".join(kept)])])


def _digests_of_files(
    paths: Sequence[str], versions: Mapping[str, tuple[Any, ...]]
) -> dict[str, str]:
    """
    Args:
        paths: the file of each piece, in order.
        versions: size and time of each file.
    """
    return {
        NAMES: _digest(sorted(versions)),
        ORDER: _digest(paths),
        VERSIONS: _digest((path, *versions[path]) for path in sorted(versions)),
        ORDER_WITHOUT_NAMES: _digest(versions.get(path) for path in paths),
        VERSIONS_WITHOUT_NAMES: _digest(sorted(versions.values(), key=repr)),
    }


def _digests_of_contents(pieces: Iterable[Piece]) -> dict[str, str]:
    """Return a digest of what is in the files of pieces; nothing if they aren't all local.

    It tells files that were changed from those that were moved, copied or written anew.
    """
    files = {piece.path: piece for piece in pieces if isinstance(piece, FilePiece)}
    sizes = [(path, piece.version.size or 0) for piece in files.values() for path in _local(piece)]
    if not files or len(sizes) < len(files):
        return {}
    try:
        sha = hashlib.sha256(repr([size for _, size in sizes]).encode())
        sha.update(repr([_values_of_path(each) for each in files.values()]).encode())
        is_small = sum(size for _, size in sizes) <= _WHOLE_BYTES
        for block in _all_blocks(sizes) if is_small else _sampled_blocks(sizes):
            sha.update(block)
    except OSError:
        # Whoever reads the rows says what is wrong with the file.
        return {}
    return {CONTENTS if is_small else SAMPLES: sha.hexdigest()[:_DIGITS]}


def _local(piece: FilePiece) -> Iterator[str]:
    """Yield the path of the piece's file if it is on a local file system."""
    if piece.filesystem is not None:
        place = ResolvedPath(piece.filesystem, piece.path, "")
    else:
        place = find(piece.path)
    if place.is_local:
        yield place.path


def _values_of_path(piece: FilePiece) -> list[Any]:
    """Return what rows of a file have from its path, and from nowhere else.

    They count whether or not their columns are read.
    """
    parts = [part for part in piece.path.split("/")[:-1] if "=" in part]
    named = {part.partition("=")[0] for part in parts}
    others = sorted(piece.constants.items())
    return parts + [each for each in others if each[0] not in named and each[1] is not None]


def _all_blocks(sizes: Iterable[tuple[str, int]]) -> Iterator[bytes]:
    for path, _ in sizes:
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                yield block


def _sampled_blocks(sizes: Sequence[tuple[str, int]]) -> Iterator[bytes]:
    """Yield blocks from evenly spaced places in the files, as if they were one."""
    ends = list(accumulate(size for _, size in sizes))
    last = max(0, ends[-1] - _BLOCK_BYTES)
    for place in np.linspace(0, last, _SAMPLED_BLOCKS, dtype=np.int64).tolist():
        index = bisect_right(ends, place)
        path, size = sizes[index]
        with open(path, "rb") as file:
            file.seek(place - (ends[index] - size))
            yield file.read(_BLOCK_BYTES)


def _digest(facts: Iterable[Any], *, digits: int | None = _DIGITS) -> str:
    return hashlib.sha256(repr(list(facts)).encode()).hexdigest()[:digits]


def _steps(dataset: Any) -> list[str]:
    """The steps of a Ray dataset, without what becomes known when it runs."""
    return re.sub(r"\((num_rows|schema)=[^\n]*", "", repr(dataset)).splitlines()


def _facts_of_column(table: pa.Table, size: int) -> list[Any]:
    """Facts about the only column of a table.

    Args:
        table: with that column.
        size: bytes of all columns together.
    """
    step = 1 if size <= _WHOLE_BYTES else max(1, table.num_rows // _SAMPLED_ROWS)
    rows = np.arange(0, table.num_rows, step)
    # Taken even if it is all: chunks, and values behind missing ones, then make no difference.
    unnamed = widened(pa.table(table.columns, names=[""]))
    sample = unnamed.take(pa.array(rows)).combine_chunks()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, sample.schema) as stream:
        stream.write_table(sample)
    facts = [hashlib.sha256(sink.getvalue()).hexdigest()]
    return facts if step == 1 else [*facts, *_sums(table)]


def _sums(table: pa.Table) -> list[str]:
    # Sums of the same numbers differ in their last digits if the chunks differ.
    return [
        f"{float(pc.sum(_summable(column)).as_py() or 0):.12g}"
        for column in table.columns
        if pa.types.is_integer(column.type) or pa.types.is_floating(column.type)
    ]


def _summable(column: pa.ChunkedArray) -> pa.ChunkedArray:
    return column.cast(pa.float32()) if pa.types.is_float16(column.type) else column
