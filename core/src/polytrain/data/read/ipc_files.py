"""Files in Arrow's own format (IPC, also called Feather): read record batch by record batch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from polytrain.data.read.file_pieces import (
    CurrentFile,
    DescribedFile,
    FilePiece,
    current_file,
    describing,
    unreadable,
)
from polytrain.data.read.pieces import in_steps
from polytrain.data.read.selection import columns_to_count, refuse_repeated, subschema
from polytrain.data.types.plain import (
    Missing,
    found_missing,
    plain_columns,
    plain_schema,
    refuse_unreadable,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordBatchPiece(FilePiece):
    """One record batch of an Arrow file."""

    batch: int

    @property
    def where(self) -> str:
        return f"{self.path!r} (record batch {self.batch})"

    def _stored(
        self, file: CurrentFile, rows: range, columns: Sequence[str], *, at_once: bool
    ) -> Iterator[pa.Table]:
        # A record batch can only be read whole.
        with _opened(file, columns) as ipc:
            table = _table(ipc, self.batch)
        self._check_rows(table.num_rows)
        table = table.slice(rows.start, len(rows))
        yield from (table,) if at_once else in_steps(table)


def described(place: str, columns: Sequence[str] | None = None) -> DescribedFile:
    """Count a file's rows and missing values, one record batch at a time: the footer has neither.

    Raises:
        SourceError: it can't be read, or has columns of the same name.
    """
    missing: set[Missing] = set()
    rows = []
    with describing(place, _explained):
        file = current_file(place)
        with _opened(file) as ipc:
            own = ipc.schema
        refuse_repeated(own.names, repr(place))
        wanted = columns_to_count(columns, own.names)
        refuse_unreadable(subschema(own, wanted))
        schema = plain_schema(own)
        with _opened(file, wanted) as ipc:
            for number in range(ipc.num_record_batches):
                table = _table(ipc, number)
                rows.append(table.num_rows)
                missing |= found_missing(table)
    return DescribedFile(
        place=place,
        schema=schema.with_metadata(own.metadata),
        missing=frozenset(missing),
        pieces=tuple(
            RecordBatchPiece(
                path=place, batch=number, rows=count, schema=schema, version=file.version
            )
            for number, count in enumerate(rows)
        ),
    )


def _explained(place: str, error: Exception) -> tuple[str, str]:
    return unreadable(place, error), (
        "Replace or remove it. If it is a stream, as Hugging Face's files are, write it as a file "
        "with pyarrow.feather.write_feather"
    )


@contextmanager
def _opened(file: CurrentFile, columns: Collection[str] | None = None) -> Iterator[Any]:
    """Open a file to read these of its columns; all by default."""
    with file.place.filesystem.open_input_file(file.place.path) as source:
        ipc = pa.ipc.open_file(source)
        if columns is not None:
            names = ipc.schema.names
            fields = [index for index, name in enumerate(names) if name in columns]
            if fields and len(fields) < len(names):
                ipc = pa.ipc.open_file(
                    source, options=pa.ipc.IpcReadOptions(included_fields=fields)
                )
        yield ipc


def _table(ipc: Any, number: int) -> pa.Table:
    return plain_columns(pa.Table.from_batches([ipc.get_batch(number)]))
