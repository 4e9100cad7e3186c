"""Data sets of `pyarrow.dataset`: Parquet ones are read in place, others become a table."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs

from polytrain.data.read import parquet_files
from polytrain.data.read.file_pieces import DescribedFile
from polytrain.data.read.pieces import Pieces
from polytrain.data.read.selection import columns_to_read, subschema
from polytrain.data.read.tables import from_table
from polytrain.data.types.missing import Missing, noted
from polytrain.data.types.plain import plain_schema
from polytrain.data.types.schemas import unified_type
from polytrain.data_errors import SourceError, one_line


def is_arrow_dataset(data: Any) -> bool:
    """Whether this is a `pyarrow.dataset.Dataset`."""
    # Whoever has one has imported its module.
    module = sys.modules.get("pyarrow.dataset")
    return module is not None and isinstance(data, module.Dataset)


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
        file = parquet_files.described(
            fragment.path, schema.names, None if local else dataset.filesystem
        )
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
        missing |= file.missing | {name for name, value in used.items() if value is None}
        missing |= {field.name for field in file.schema if pa.types.is_null(field.type)}
        described.append((file, used))
    schema = noted(schema, missing)
    pieces = [piece for file, used in described for piece in file.pieces_in(schema, used)]
    return Pieces(schema=schema, pieces=tuple(pieces))
