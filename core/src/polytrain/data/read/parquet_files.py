"""Parquet files: described by their footers, read row group by row group."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from polytrain.data.read.file_version import UNKNOWN, FileVersion, check_unchanged, version_of
from polytrain.data.read.pieces import Piece, rows_of_scan
from polytrain.data.types.extension_types import plain_columns, plain_schema
from polytrain.data.types.missing import InLists, Missing, decides_type, is_list
from polytrain.data.types.schemas import (
    bare,
    conformed,
    index_columns,
    refuse_repeated,
    subschema,
    without,
)
from polytrain.data.types.unreadable import refuse_unreadable
from polytrain.data_errors import ReadError, SourceError, one_line
from polytrain.storage.filesystems import ResolvedPath, find

_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RowGroupPiece(Piece):
    """One row group of a Parquet file."""

    path: str
    row_group: int
    rows: int
    schema: pa.Schema
    """In the types of the data set, which may be wider than the file's."""

    constants: Mapping[str, Any] = field(default_factory=dict)
    """Columns that aren't in the file, with the value that all its rows have."""

    filesystem: Any = None
    """Where the path lies, if the user has brought a `pyarrow.fs.FileSystem`."""

    version: FileVersion = UNKNOWN

    @property
    def where(self) -> str:
        return f"{self.path!r} (row group {self.row_group})"

    @property
    def reads_into_own_memory(self) -> bool:
        return True

    def read(self, start: int, stop: int, columns: Sequence[str] | None = None) -> pa.Table:
        names = self.schema.names if columns is None else list(columns)
        parts = [*self._parts(range(start, stop), names)]
        # Tables without columns lose their number of rows when they are put together.
        table = parts[0] if len(parts) == 1 else pa.concat_tables(parts)
        return self._conformed(table, names)

    def parts(self, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        names = self.schema.names if columns is None else list(columns)
        for part in self._parts(range(self.rows), names, whole=False):
            yield self._conformed(part, names)

    def scan(
        self, start: int, stop: int, columns: Sequence[str] | None = None
    ) -> Iterator[pa.Table]:
        names = self.schema.names if columns is None else list(columns)
        for part in self._parts(range(start, stop), names, whole=False):
            yield self._conformed(part, names)

    def _conformed(self, table: pa.Table, names: Sequence[str]) -> pa.Table:
        wanted = subschema(self.schema, names)
        return conformed(plain_columns(table), wanted, self.where, self.constants)

    def _parts(
        self, rows: range, names: Sequence[str], *, whole: bool = True
    ) -> Iterator[pa.Table]:
        """Rows as the file has them.

        Args:
            rows: counted within the row group.
            names: of the columns.
            whole: all rows of the row group are one part.
        """
        stored = [name for name in names if name not in self.constants]
        at_once = not stored or (whole and len(rows) == self.rows)
        try:
            with _opened(self.path, self.filesystem, at_once=at_once) as (file, version):
                self._check(file.metadata)
                check_unchanged(self.where, self.version, version)
                if at_once:
                    group = file.read_row_group(self.row_group, columns=stored)
                    yield group.slice(rows.start, len(rows))
                else:
                    yield from _rows(file, self.row_group, rows, stored)
        except (pa.ArrowException, OSError) as error:
            raise ReadError(f"{self.where} can't be read: {one_line(error)}") from error

    def _check(self, metadata: Any) -> None:
        found = (
            metadata.row_group(self.row_group).num_rows
            if self.row_group < metadata.num_row_groups
            else 0
        )
        if found != self.rows:
            raise ReadError(
                f"{self.where} has {found} rows where it had {self.rows}: the file has changed "
                "since the run began. Give a run files that stay as they are"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ParquetFile:
    """What a Parquet file's footer tells."""

    place: str
    schema: pa.Schema
    row_groups: tuple[int, ...]
    """Rows of each."""

    missing: frozenset[Missing] = frozenset()
    """What is missing, as far as the footer tells."""

    filesystem: Any = None
    version: FileVersion = UNKNOWN

    @property
    def rows(self) -> int:
        """Rows of the file."""
        return sum(self.row_groups)

    def pieces(self, schema: pa.Schema, constants: Mapping[str, Any]) -> Iterator[Piece]:
        """A piece for each row group that has rows, in the types of this schema."""
        for number, rows in enumerate(self.row_groups):
            if rows:
                yield RowGroupPiece(
                    path=self.place,
                    row_group=number,
                    rows=rows,
                    schema=schema,
                    constants=constants,
                    filesystem=self.filesystem,
                    version=self.version,
                )


def described(
    place: str, columns: Sequence[str] | None = None, filesystem: Any = None
) -> ParquetFile:
    """Read a file's footer.

    Args:
        place: a path or an address.
        columns: which columns are of interest; all by default.
        filesystem: where the path lies, if the user has brought a `pyarrow.fs.FileSystem`.

    Raises:
        SourceError: it can't be read, or has columns of the same name.
    """
    try:
        with _opened(place, filesystem) as (file, version):
            metadata, schema = file.metadata, file.schema_arrow
            groups = tuple(
                metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)
            )
    except PermissionError as error:
        raise SourceError(f"{place!r} can't be read: {one_line(error)}", "Make it readable") from (
            error
        )
    except (pa.ArrowException, OSError) as error:
        raise SourceError(
            f"{place!r} can't be read: {one_line(error)}", "Replace or remove it"
        ) from error
    refuse_repeated(schema.names, repr(place))
    index = index_columns(schema)
    names = without(schema.names, index) if columns is None else columns
    refuse_unreadable(subschema(schema, [name for name in schema.names if name in names]))
    own = bare(plain_schema(schema))
    wanted = [field for field in own if columns is None or field.name in columns]
    return ParquetFile(
        place=place,
        schema=own.with_metadata(schema.metadata),
        row_groups=groups,
        missing=_missing(
            metadata, {field.name: field.type for field in wanted if decides_type(field.type)}
        ),
        filesystem=filesystem,
        version=version,
    )


def _missing(metadata: Any, types: Mapping[str, pa.DataType]) -> frozenset[Missing]:
    """What the footer says that is missing in the columns of these types."""
    # Tensors are lists in the file, and lie one level down.
    leaves = [metadata.schema.column(leaf).path for leaf in range(metadata.num_columns)]
    owners = {
        leaf: path if path in types else path.split(".")[0] for leaf, path in enumerate(leaves)
    }
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


def _missing_lists(name: str, kind: pa.DataType, rows: int, chunk: Any) -> Iterator[Missing]:
    """Whether lists of a fixed size are missing, or lack numbers: the footer counts both as one."""
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


def _rows(file: Any, row_group: int, rows: range, columns: list[str]) -> Iterator[pa.Table]:
    """Rows of a row group. Never more of it than a part is in memory."""
    first = 0
    found = False
    group = file.metadata.row_group(row_group)
    at_once = rows_of_scan(group.total_byte_size / max(1, group.num_rows))
    for batch in file.iter_batches(at_once, row_groups=[row_group], columns=columns):
        start, stop = max(rows.start - first, 0), rows.stop - first
        if start < batch.num_rows:
            found = True
            yield pa.Table.from_batches([batch]).slice(start, stop - start)
        first += batch.num_rows
        if first >= rows.stop:
            break
    if not found:
        yield file.read_row_group(row_group, columns=columns).slice(0, 0)


class _Footers:
    """The footers read last: one of a file with thousands of row groups takes long to parse."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._footers: OrderedDict[Any, Any] = OrderedDict()
        self._lock = Lock()

    def get(self, key: Any) -> Any:
        with self._lock:
            footer = self._footers.get(key)
            if footer is not None:
                self._footers.move_to_end(key)
            return footer

    def put(self, key: Any, footer: Any) -> None:
        with self._lock:
            self._footers[key] = footer
            self._footers.move_to_end(key)
            while len(self._footers) > self._most:
                self._footers.popitem(last=False)


_footers = _Footers(most=8)


@contextmanager
def _opened(
    place: str, filesystem: Any, *, at_once: bool = True
) -> Iterator[tuple[Any, FileVersion]]:
    """The file, and which version of it this is.

    Args:
        place: a path or an address.
        filesystem: where the path lies, if the user has brought a `pyarrow.fs.FileSystem`.
        at_once: what is read may be in memory as a whole.
    """
    where = find(place) if filesystem is None else ResolvedPath(filesystem, place, "")
    version = version_of(where)
    # A file that was replaced is another one.
    key = (where.root, where.path, version)
    footer = _footers.get(key)
    with where.filesystem.open_input_file(where.path) as source:
        # Remote files are read in few large requests, all at once. Checksums are compared in pages
        # that have some.
        file = pq.ParquetFile(
            source,
            metadata=footer,
            pre_buffer=not where.is_local,
            # Otherwise Arrow reads the whole column of a row group, of which a part is wanted.
            buffer_size=0 if at_once or not where.is_local else _BUFFER_BYTES,
            page_checksum_verification=True,
        )
        if footer is None:
            _footers.put(key, file.metadata)
        yield file, version
