"""What one rank reads of a data set, and the reading of it, by its agent."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from polytrain.data.plan import pieces_of, rank_rows
from polytrain.data.reader import ShardInfo
from polytrain.data.sources import Piece, Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Rows start … stop - 1 of one piece."""

    piece: Piece
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What one rank reads of a data set."""

    info: ShardInfo
    schema: pa.Schema
    parts: tuple[Part, ...]


def assign(source: Source, world_size: int, rank: int, *, whole: bool) -> Assignment:
    """The part of a data set that one rank gets: its shard, or all of it."""
    num_rows = source.info.num_rows
    shards = 1 if whole else world_size
    rows = rank_rows(num_rows, shards, 0 if whole else rank)
    sizes = [piece.rows for piece in source.pieces]
    return Assignment(
        info=ShardInfo(
            name=source.info.name,
            total_rows=num_rows,
            # The sizes of shards are at most one apart.
            most_rows=-(-num_rows // shards),
            fewest_rows=num_rows // shards,
        ),
        schema=source.schema,
        parts=tuple(
            Part(piece=source.pieces[found.piece], start=found.start, stop=found.stop)
            for found in pieces_of(sizes, rows)
        ),
    )


def read(assignment: Assignment) -> pa.Table:
    """Read the assigned rows, with the columns and types of the data set's schema."""
    schema = assignment.schema
    tables = [part.piece.read(part.start, part.stop) for part in assignment.parts]
    if not tables:
        return _empty(schema)
    return pa.concat_tables([table.select(schema.names).cast(schema) for table in tables])


def _empty(schema: pa.Schema) -> pa.Table:
    # `Schema.empty_table` knows no tensors.
    columns = [
        pa.ExtensionArray.from_storage(field.type, pa.array([], field.type.storage_type))
        if isinstance(field.type, pa.BaseExtensionType)
        else pa.array([], field.type)
        for field in schema
    ]
    return pa.table(columns, schema=schema)
