"""What a data set is, in short: data sets that differ have, in all likelihood, other fingerprints.

Files are known by their place, size and time of modification, tables in memory by their rows (large
ones by their sums and a sample), everything else by its kind, its types and its number of rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from polytrain.common.data_errors import SourceError
from polytrain.data.sources.describe import Source
from polytrain.data.sources.pieces import Piece, TablePiece
from polytrain.data.sources.transforms import TransformedPiece
from polytrain.storage.filesystems import find

_WHOLE_BYTES = 64 << 20
"""Tables up to this size are hashed whole, which takes a few tenths of a second at most."""

_SAMPLED_ROWS = 1000

_Facts = tuple[Any, ...]


def fingerprint(source: Source) -> str:
    """The fingerprint of a data set, without what is done to its rows when they are read."""
    digest = hashlib.sha256(str(source.schema.remove_metadata()).encode())
    # Of a file with many row groups, once.
    facts_of_file = lru_cache(maxsize=None)(_facts_of_file)
    for piece in source.pieces:
        digest.update(repr(_facts_of(piece, facts_of_file)).encode())
    return digest.hexdigest()


def _facts_of(piece: Piece, facts_of_file: Callable[[str, Any], _Facts]) -> _Facts:
    if isinstance(piece, TransformedPiece):
        return _facts_of(piece.piece, facts_of_file)
    if isinstance(piece, TablePiece):
        return (piece.rows, *_facts_of_table(piece.table))
    path = getattr(piece, "path", None)
    if path is None:
        return (piece.where, piece.rows)
    return (path, piece.rows, *facts_of_file(path, getattr(piece, "filesystem", None)))


def _facts_of_file(path: str, filesystem: Any) -> _Facts:
    """Size and time of modification; nothing where the storage doesn't tell."""
    try:
        if filesystem is None:
            place = find(path)
            filesystem, path = place.filesystem, place.path
        info = filesystem.get_file_info(path)
    except (SourceError, OSError, pa.ArrowException):
        return ()
    return (info.size, info.mtime_ns)


def _facts_of_table(table: pa.Table) -> _Facts:
    step = 1 if table.nbytes <= _WHOLE_BYTES else max(1, table.num_rows // _SAMPLED_ROWS)
    rows = np.arange(0, table.num_rows, step)
    # Taken even if it is all: chunks, and what lies behind missing values, make no difference then.
    sample = table.take(pa.array(rows)).replace_schema_metadata(None).combine_chunks()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, sample.schema) as stream:
        stream.write_table(sample)
    facts = (hashlib.sha256(sink.getvalue()).hexdigest(),)
    return facts if step == 1 else (*facts, *_sums(table))


def _sums(table: pa.Table) -> list[str]:
    # Sums of the same numbers differ in their last digits where the numbers lie in other chunks.
    return [
        f"{float(pc.sum(_summable(column)).as_py() or 0):.12g}"
        for column in table.columns
        if pa.types.is_integer(column.type) or pa.types.is_floating(column.type)
    ]


def _summable(column: pa.ChunkedArray) -> pa.ChunkedArray:
    return column.cast(pa.float32()) if pa.types.is_float16(column.type) else column
