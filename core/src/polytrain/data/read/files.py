"""Data sets in files: all of them described, and brought to the same columns and types."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa

from polytrain.data.read import csv_files, ipc_files, json_files, parquet_files
from polytrain.data.read.expansion import FoundFile, expand, partition_types
from polytrain.data.read.file_pieces import DescribedFile
from polytrain.data.read.pieces import Piece, Pieces
from polytrain.data.read.selection import chosen, index_columns, without
from polytrain.data.types.missing import noted
from polytrain.data.types.schemas import merged_schema
from polytrain.data_errors import SourceError
from polytrain.text.first_few import numbered

_AT_ONCE = 8
"""Files that are looked at concurrently: a remote one takes a while to answer."""


def from_places(places: Sequence[str], columns: Sequence[str] | None, *, listed: bool) -> Pieces:
    """Describe the files that paths, directories and globs stand for.

    Args:
        places: paths and addresses.
        columns: which columns; all by default.
        listed: the user has given a list of them.

    Raises:
        SourceError: there are none, one can't be read, or they don't fit together.
    """
    files = [file for place in places for file in expand(place, listed=listed)]

    def describe(file: FoundFile) -> DescribedFile:
        if file.format == "ipc":
            return ipc_files.described(file.place, columns, elsewhere=file.partition)
        if file.format == "jsonl":
            return json_files.described(file.place, columns, elsewhere=file.partition)
        if file.format != "parquet":
            return csv_files.described(file.place, columns, elsewhere=file.partition)
        return parquet_files.described(file.place, columns)

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
        described: the files.
        files: the same, with the columns in the names of their directories.
        columns: which columns; all by default.
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
    names = without(_agreed_names(filled, columns, index), index)
    missing = {name for file in filled for name in file.missing}
    schema = merged_schema(
        [(file.where, file.schema) for file in filled],
        "Give the columns of all files of a data set the same types",
        names,
    )
    schema = noted(schema, missing)
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
            *(field.name for field in file.schema if pa.types.is_null(field.type)),
        }

    def pieces(self, schema: pa.Schema) -> Iterator[Piece]:
        """The file's pieces, in the types of this schema."""
        constants = {name: value for name, value in self.constants.items() if name in schema.names}
        yield from self.file.pieces_in(schema, constants)


def _agreed_names(
    files: Sequence[_Whole], columns: Sequence[str] | None, index: Collection[str]
) -> list[str]:
    """The columns of a data set. All its files must have them, but for those of an index."""
    first = files[0]
    if columns is not None:
        for file in files:
            chosen(columns, file.schema.names, of=file.where)
        return list(columns)
    names = {*without(first.schema.names, index)}
    for file in files[1:]:
        others = {*without(file.schema.names, index)}
        for less, more, odd in (
            (file, first, sorted(names - others)),
            (first, file, sorted(others - names)),
        ):
            if odd:
                raise SourceError(
                    f"{less.where} has no column {', '.join(map(repr, odd))}, which "
                    f"{more.where} has",
                    "Give all files of a data set the same columns, or pass columns=[…] with "
                    "those that all of them have",
                )
    return list(first.schema.names)
