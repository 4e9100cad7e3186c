"""Opens a worker's shards: its rank's parts of all data sets, at the position to resume from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import pyarrow as pa

from polytrain.data.plan.cursor import Cursor
from polytrain.data.plan.position import DataPosition, StreamPosition
from polytrain.data.shards.rows import MappedRows, PieceRows, ReadableRows
from polytrain.data.shards.rows_shard import RowsShard
from polytrain.data.shards.shard import BatchedShard
from polytrain.data.shards.spec import DatasetSpec, Held, StreamSpec
from polytrain.data.shards.stream_shard import PartSource, StreamShard


def open_shards(
    specs: Iterable[DatasetSpec],
    tables: Iterator[pa.Table],
    positions: Mapping[str, Any],
    *,
    skipped: Mapping[str, Iterable[tuple[int, int, int]]] = MappingProxyType({}),
    world_size: int,
    rank: int,
    local_world_size: int = 1,
    streams: Iterable[PartSource] = (),
) -> dict[str, BatchedShard]:
    """Open a rank's shards.

    Args:
        tables: the rows that the agent holds, of each data set of which it holds rows, in order.
        positions: the saved positions by the data set's name, as plain values.
        skipped: what a run leaves out of a data set, by its name; see `Cursor`.
        streams: the source of parts of each streaming data set, in order.

    Raises:
        DataChangedError: a position isn't valid in the data as they are now.
    """
    shards: dict[str, BatchedShard] = {}
    part_sources = iter(streams)
    for spec in specs:
        saved = positions.get(spec.name)
        if isinstance(spec, StreamSpec):
            shards[spec.name] = StreamShard(
                spec,
                next(part_sources),
                Cursor(StreamPosition.resume(spec.name, saved, world_size, spec.digests)),
                world_size=world_size,
                rank=rank,
            )
            continue
        rows: ReadableRows
        if spec.held is Held.NOTHING:
            rows = PieceRows(spec.pieces, spec.schema)
        else:
            held = spec.held_rows(world_size, rank)
            rows = MappedRows(next(tables), held, workers=local_world_size)
        position = DataPosition.resume(spec.name, saved, spec.plan, spec.digests, whole=spec.whole)
        cursor = Cursor(position, skipped=skipped.get(spec.name, ()), resumes=saved is not None)
        shards[spec.name] = RowsShard(spec, rows, cursor, world_size=world_size, rank=rank)
    return shards
