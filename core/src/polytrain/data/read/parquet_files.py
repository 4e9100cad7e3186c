"""Parquet files: described by their footers, read row group by row group."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from polytrain.data.read.file_pieces import (
    CurrentFile,
    DescribedFile,
    FilePiece,
    current_file,
    describing,
)
from polytrain.data.read.pieces import rows_of_scan
from polytrain.data.read.selection import index_columns, refuse_repeated, subschema, without
from polytrain.data.types.nested import is_list
from polytrain.data.types.plain import (
    InLists,
    Missing,
    decides_type,
    plain_columns,
    plain_schema,
    refuse_unreadable,
)

_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RowGroupPiece(FilePiece):
    """One row group of a Parquet file."""

    row_group: int

    @property
    def where(self) -> str:
        return f"{self.path!r} (row group {self.row_group})"

    @property
    def reads_into_own_memory(self) -> bool:
        return True

    def _stored(
        self, file: CurrentFile, rows: range, columns: Sequence[str], *, at_once: bool
    ) -> Iterator[pa.Table]:
        columns, whole = list(columns), at_once and len(rows) == self.rows
        with _opened(file, at_once=whole) as parquet:
            metadata, number = parquet.metadata, self.row_group
            is_there = number < metadata.num_row_groups
            self._check_rows(metadata.row_group(number).num_rows if is_there else 0)
            if whole:
                yield plain_columns(parquet.read_row_group(number, columns=columns))
                return
            for table in _rows(parquet, number, rows, columns):
                yield plain_columns(table)


def described(
    place: str, columns: Sequence[str] | None = None, filesystem: Any = None
) -> DescribedFile:
    """Read a file's footer.

    Args:
        filesystem: where the path lies, if the user has brought a `pyarrow.fs.FileSystem`.

    Raises:
        SourceError: it can't be read, or has columns of the same name.
    """
    with describing(place):
        file = current_file(place, filesystem)
        with _opened(file) as parquet:
            metadata, schema = parquet.metadata, parquet.schema_arrow
    refuse_repeated(schema.names, repr(place))
    index = index_columns(schema)
    names = without(schema.names, index) if columns is None else columns
    refuse_unreadable(subschema(schema, [name for name in schema.names if name in names]))
    own = plain_schema(schema)
    wanted = [field for field in own if columns is None or field.name in columns]
    return DescribedFile(
        place=place,
        schema=own.with_metadata(schema.metadata),
        missing=_missing(
            metadata,
            frozenset(own.names),
            {field.name: field.type for field in wanted if decides_type(field.type)},
        ),
        pieces=tuple(
            RowGroupPiece(
                path=place,
                row_group=number,
                rows=metadata.row_group(number).num_rows,
                schema=own,
                filesystem=filesystem,
                version=file.version,
            )
            for number in range(metadata.num_row_groups)
        ),
    )


def _missing(
    metadata: Any, names: Collection[str], types: Mapping[str, pa.DataType]
) -> frozenset[Missing]:
    """The columns in which values are missing, by the footer.

    Args:
        names: of all columns.
        types: of those that are looked at.
    """
    leaves = [metadata.schema.column(leaf).path for leaf in range(metadata.num_columns)]
    owners = {leaf: _owner(path, names) for leaf, path in enumerate(leaves)}
    unseen = {leaf: name for leaf, name in owners.items() if name in types}
    found: set[Missing] = set()
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        for leaf, name in list(unseen.items()):
            statistics = group.column(leaf).statistics
            if statistics is None or not statistics.has_null_count or not statistics.null_count:
                continue
            if is_list(types[name]):
                found.update(_missing_lists(name, types[name], group.num_rows, group.column(leaf)))
            else:
                found.add(name)
                del unseen[leaf]
    return frozenset(found)


def _owner(path: str, names: Collection[str]) -> str:
    """The column of a path: tensors and lists lie some levels down, and names may have dots."""
    while path and path not in names:
        path = path.rpartition(".")[0]
    return path


def _missing_lists(name: str, kind: pa.DataType, rows: int, chunk: Any) -> Iterator[Missing]:
    """Tell missing lists of a fixed size from missing numbers: the footer counts both as one."""
    size = kind.list_size
    if size == 1 or is_list(kind.value_type):
        yield from (name, InLists(name))
        return
    # A missing list is one value, any other one as many as it has numbers.
    lists = (rows * size - chunk.num_values) // (size - 1)
    if lists:
        yield name
    if chunk.statistics.null_count > lists:
        yield InLists(name)


def _rows(parquet: Any, row_group: int, rows: range, columns: list[str]) -> Iterator[pa.Table]:
    """Yield rows of a row group, of which no more than a part is in memory at once."""
    first = 0
    found = False
    group = parquet.metadata.row_group(row_group)
    at_once = rows_of_scan(group.total_byte_size / max(1, group.num_rows))
    for batch in parquet.iter_batches(at_once, row_groups=[row_group], columns=columns):
        start, stop = max(rows.start - first, 0), rows.stop - first
        if start < batch.num_rows:
            found = True
            yield pa.Table.from_batches([batch]).slice(start, stop - start)
        first += batch.num_rows
        if first >= rows.stop:
            break
    if not found:
        yield parquet.read_row_group(row_group, columns=columns).slice(0, 0)


_MOST_FOOTERS = 8
_footers: dict[Any, Any] = {}
"""Those that were read last: to parse that of a file with thousands of row groups takes long."""

_footers_lock = Lock()


def _remember(key: Any, footer: Any) -> None:
    with _footers_lock:
        _footers.pop(key, None)
        _footers[key] = footer
        while len(_footers) > _MOST_FOOTERS:
            del _footers[next(iter(_footers))]


@contextmanager
def _opened(file: CurrentFile, *, at_once: bool = True) -> Iterator[Any]:
    """Open a file as a `ParquetFile`.

    Args:
        at_once: what is read may be in memory as a whole.
    """
    place = file.place
    # A file that was replaced is another one.
    key = (place.root, place.path, file.version)
    footer = _footers.get(key)
    with place.filesystem.open_input_file(place.path) as source:
        # Remote files are read in few large requests, all at once. Checksums are compared in pages
        # that have some.
        parquet = pq.ParquetFile(
            source,
            metadata=footer,
            pre_buffer=not place.is_local,
            # Without a buffer Arrow reads a row group's whole column, even for a part of it.
            buffer_size=0 if at_once or not place.is_local else _BUFFER_BYTES,
            page_checksum_verification=True,
        )
        _remember(key, parquet.metadata)
        yield parquet
