"""The shards of a trainer: its rank's parts of all data sets, at the position to go on from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa

from polytrain.data.cursor import cursor_at
from polytrain.data.position import DataPosition
from polytrain.data.reader import RowsShard
from polytrain.data.rows import MappedRows, PieceRows, Rows
from polytrain.data.spec import Held, ShardSpec


def open_shards(
    specs: Iterable[ShardSpec],
    tables: Iterator[pa.Table],
    positions: Mapping[str, Any],
    *,
    world_size: int,
    rank: int,
) -> dict[str, RowsShard]:
    """Open a rank's shards.

    Args:
        specs: of all data sets.
        tables: what the agent holds, of each data set of which it holds something, in that order.
        positions: where to go on, by the data set's name, as plain values; at the start where there
            is none.
        world_size: number of ranks.
        rank: this one.
    """
    known = {name: DataPosition.from_plain(plain) for name, plain in positions.items()}
    shards = {}
    for spec in specs:
        rows: Rows
        if spec.held is Held.NOTHING:
            rows = PieceRows(spec.pieces, spec.schema)
        else:
            rows = MappedRows(next(tables), spec.held_rows(world_size, rank))
        cursor = cursor_at(spec.name, spec.plan, known)
        shards[spec.name] = RowsShard(spec, rows, cursor, world_size=world_size, rank=rank)
    return shards
