"""Data sets in files: all of them described, and brought to the same columns and types.

Parquet files that a `pyarrow.dataset` names are read in place; its others become a table.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs

from polytrain.data.read import csv_files, ipc_files, json_files, parquet_files
from polytrain.data.read.expansion import FoundFile, expand, partition_types
from polytrain.data.read.file_pieces import DescribedFile
from polytrain.data.read.pieces import Piece, Pieces
from polytrain.data.read.selection import (
    agreed_schema,
    columns_to_read,
    index_columns,
    subschema,
    without,
)
from polytrain.data.read.tables import from_table
from polytrain.data.types.plain import Missing, missing_in, noted, plain_schema
from polytrain.data.types.schemas import unified_type
from polytrain.data_errors import SourceError, one_line
from polytrain.storage.filesystems import find
from polytrain.text.described import numbered

_DESCRIBED: Mapping[str, Callable[[str, Sequence[str] | None], DescribedFile]] = {
    "parquet": parquet_files.described,
    "csv": csv_files.described,
    "tsv": csv_files.described,
    "jsonl": json_files.described,
    "ipc": ipc_files.described,
}

_AT_ONCE = 8
"""Files that are looked at concurrently: a remote one takes a while to answer."""


def from_places(places: Sequence[str], columns: Sequence[str] | None, *, listed: bool) -> Pieces:
    """Describe the files that paths, directories and globs stand for.

    Args:
        listed: the user has given a list of them.

    Raises:
        SourceError: there are none, one can't be read, or they don't fit together.
    """
    files = [file for place in places for file in expand(place, listed=listed)]

    def describe(file: FoundFile) -> DescribedFile:
        return _DESCRIBED[file.format](file.place, columns)

    if len(files) == 1:
        return together([describe(files[0])], files, columns)
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="polytrain-describe") as threads:
        try:
            return together(list(threads.map(describe, files)), files, columns)
        except SourceError:
            threads.shutdown(cancel_futures=True)
            raise


def together(
    described: Sequence[DescribedFile], files: Sequence[FoundFile], columns: Sequence[str] | None
) -> Pieces:
    """Files as one data set.

    Args:
        files: the same, with the columns in the names of their directories.
    """
    types = partition_types(files)
    whole = [_Whole(file, found, types) for file, found in zip(described, files, strict=True)]
    # The columns of a file without rows don't count: its writer often knew nothing of them.
    filled = [file for file in whole if file.file.rows]
    if not filled:
        raise SourceError(
            f"its {numbered(len(files), 'file', 'hold')} no rows", "Pass a data set with rows"
        )
    index = {name: None for file in filled for name in file.index} if columns is None else {}
    schema = agreed_schema(
        [
            (file.where, subschema(file.schema, without(file.schema.names, index)))
            for file in filled
        ],
        columns,
        whole="all files of a data set",
        missing=(each for file in filled for each in file.missing),
    )
    return Pieces(
        schema=schema,
        pieces=tuple(piece for file in filled for piece in file.pieces(schema)),
        index=tuple(index),
    )


class _Whole:
    """A file with the columns in the names of its directories."""

    def __init__(
        self, file: DescribedFile, found: FoundFile, types: Mapping[str, pa.DataType]
    ) -> None:
        self.file = file
        self.where = repr(file.place)
        self.index = index_columns(file.schema)
        # Some writers put the column into the file as well.
        self.constants = {
            name: value if value is None or types[name] == pa.string() else int(value)
            for name, value in found.partition.items()
            if name not in file.schema.names
        }
        extra = [pa.field(name, types[name]) for name in self.constants]
        self.schema = pa.schema([*file.schema, *extra])
        self.missing = {
            *file.missing,
            *(name for name, value in self.constants.items() if value is None),
        }

    def pieces(self, schema: pa.Schema) -> Iterator[Piece]:
        """The file's pieces, in the types of this schema."""
        constants = {name: value for name, value in self.constants.items() if name in schema.names}
        yield from self.file.pieces_in(schema, constants)


def is_arrow_dataset(data: Any) -> bool:
    """Whether this is a `pyarrow.dataset.Dataset`."""
    # Whoever has one has imported its module. Another thread may be importing it just now.
    return isinstance(data, getattr(sys.modules.get("pyarrow.dataset"), "Dataset", ()))


def from_arrow_dataset(dataset: Any, columns: Sequence[str] | None) -> Pieces:
    """Describe a data set without reading its rows, if it is in Parquet files.

    Raises:
        SourceError: it can't be read.
    """
    names, index = columns_to_read(dataset.schema, columns)
    try:
        pieces = _row_groups(dataset, plain_schema(subschema(dataset.schema, names)))
        if pieces is None:
            pieces = from_table(dataset.to_table(columns=names), names)
    except (pa.ArrowException, OSError) as error:
        raise SourceError(
            f"the pyarrow dataset can't be read: {one_line(error)}", "Check its files"
        ) from error
    return replace(pieces, index=index)


def _row_groups(dataset: Any, schema: pa.Schema) -> Pieces | None:
    """The data set's row groups as pieces; None if it consists of anything else."""
    import pyarrow.dataset as pads

    if not isinstance(dataset, pads.FileSystemDataset) or not isinstance(
        dataset.format, pads.ParquetFileFormat
    ):
        return None
    local = isinstance(dataset.filesystem, pafs.LocalFileSystem)
    described: list[tuple[DescribedFile, Mapping[str, Any]]] = []
    missing: set[Missing] = set()
    try:
        fragments = list(dataset.get_fragments())
    except ValueError:
        # It has a filter.
        return None
    for fragment in fragments:
        # The path of a local file may be relative.
        place = find(fragment.path).path if local else fragment.path
        file = parquet_files.described(place, schema.names, None if local else dataset.filesystem)
        if fragment.row_groups and len(fragment.row_groups) != len(file.pieces):
            return None
        constants = pads.get_partition_keys(fragment.partition_expression)
        # As Arrow does it: what a file lacks is null in its rows.
        absent = [name for name in schema.names if name not in (*file.schema.names, *constants)]
        constants = {name: constants.get(name) for name in (*constants, *absent)}
        for field in schema:
            if field.name not in constants:
                own = file.schema.field(field.name).type
                if unified_type(field.type, own) != field.type:
                    # Arrow narrows, or fails, as it reads.
                    return None
        used = {name: value for name, value in constants.items() if name in schema.names}
        missing |= file.missing | missing_in(file.schema)
        missing |= {name for name, value in used.items() if value is None}
        described.append((file, used))
    schema = noted(schema, missing)
    pieces = [piece for file, used in described for piece in file.pieces_in(schema, used)]
    return Pieces(schema=schema, pieces=tuple(pieces))
