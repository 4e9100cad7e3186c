"""The shards of a worker: its rank's parts of all data sets, at the position to resume from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa

from polytrain.data.plan.cursor import Cursor
from polytrain.data.plan.position import (
    DataChangedError,
    DataPosition,
    StreamPosition,
    resumed,
    resumed_stream,
)
from polytrain.data.plan.row_plan import Plan
from polytrain.data.shards.batched import BatchedShard
from polytrain.data.shards.reader import RowsShard
from polytrain.data.shards.rows import MappedRows, PieceRows, Rows
from polytrain.data.shards.spec import Held, ShardSpec
from polytrain.data.streams.stream import PartSource, StreamShard, StreamSpec


def open_shards(
    specs: Iterable[ShardSpec | StreamSpec],
    tables: Iterator[pa.Table],
    positions: Mapping[str, Any],
    *,
    world_size: int,
    rank: int,
    local_world_size: int = 1,
    streams: Iterable[PartSource] = (),
) -> dict[str, BatchedShard]:
    """Open a rank's shards.

    Args:
        specs: of all data sets.
        tables: what the agent holds, of each data set of which it holds something, in that order.
        positions: where to go on, by the data set's name, as plain values; at the start where there
            is none.
        world_size: number of ranks.
        rank: this one.
        local_world_size: number of ranks on this node.
        streams: where the parts of each streaming data set come from, in the order of the specs.

    Raises:
        DataChangedError: a position means nothing in the data as it is now.
    """
    shards: dict[str, BatchedShard] = {}
    part_sources = iter(streams)
    for spec in specs:
        position = positions.get(spec.name)
        if isinstance(spec, StreamSpec):
            shards[spec.name] = StreamShard(
                spec,
                next(part_sources),
                Cursor(in_stream(spec.name, position, world_size, spec.data)),
                world_size=world_size,
                rank=rank,
            )
            continue
        rows: Rows
        if spec.held is Held.NOTHING:
            rows = PieceRows(spec.pieces, spec.schema)
        else:
            held = spec.held_rows(world_size, rank)
            rows = MappedRows(next(tables), held, workers=local_world_size)
        cursor = Cursor(in_plan(spec.name, position, spec.plan, spec.data))
        shards[spec.name] = RowsShard(spec, rows, cursor, world_size=world_size, rank=rank)
    return shards


def in_plan(
    name: str, position: Mapping[str, Any] | None, plan: Plan, data: Mapping[str, str]
) -> DataPosition:
    """Where to go on in what is read by this plan.

    Args:
        name: of the data set.
        position: as a manifest has it; None at the start.
        plan: how it is read now.
        data: what it is known by now: see `fingerprint.marks`.

    Raises:
        DataChangedError: the position means nothing by this plan, or in these data.
    """
    if position is None:
        return DataPosition(plan=plan, data=data)
    if "plan" not in position:
        raise DataChangedError(
            f"The data set {name!r} was a stream when the checkpoint was made, and isn't now"
        )
    return resumed(name, DataPosition.from_plain(position), plan, data)


def in_stream(
    name: str, position: Mapping[str, Any] | None, world_size: int, data: Mapping[str, str]
) -> StreamPosition:
    """The same for a stream.

    Raises:
        DataChangedError: it was none, or another one.
    """
    if position is None:
        return StreamPosition(world_size=world_size, data=data)
    if "legs" not in position:
        raise DataChangedError(
            f"The data set {name!r} is a stream now, and wasn't when the checkpoint was made"
        )
    return resumed_stream(name, StreamPosition.from_plain(position, world_size), data)
