"""A shard whose rows can be had in any order: as a whole, or in batches by the plan."""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import ExitStack

import pyarrow as pa

from polytrain.data.plan.cursor import Cursor, Epoch
from polytrain.data.plan.order import Order, OrderOfGroups
from polytrain.data.plan.position import DataPosition
from polytrain.data.plan.row_plan import EpochOrder, Remainder
from polytrain.data.shards.batched import Batch, BatchedShard
from polytrain.data.shards.formats import empty_table
from polytrain.data.shards.regions import RowSlice
from polytrain.data.shards.rows import Rows, Stream
from polytrain.data.shards.spec import ShardSpec

logger = logging.getLogger(__name__)


class RowsShard(BatchedShard):
    """One rank's part of a data set that the plan divides."""

    def __init__(
        self,
        spec: ShardSpec,
        rows: Rows,
        cursor: Cursor[DataPosition],
        *,
        world_size: int,
        rank: int,
    ) -> None:
        world_size, rank = spec.place(world_size, rank)
        super().__init__(
            name=spec.name, cursor=cursor, remainder=spec.remainder, world_size=world_size
        )
        self.total_rows = spec.num_rows
        self._spec = spec
        self._plan = cursor.position.plan
        self._rows = rows
        self._rank = rank
        self._share = spec.share(world_size, rank)
        self._reported_dropped = False

    def __len__(self) -> int:
        return len(self._share)

    @property
    def schema(self) -> pa.Schema:
        return self._spec.schema

    @property
    def is_whole(self) -> bool:
        return self._spec.whole

    def count(self) -> int:
        return self._rows.count(self._share)

    def to_arrow(self) -> pa.Table:
        return self._rows.read(self._share)

    def read(self, rows: range) -> pa.Table:
        return self._rows.read(self._share[rows.start : rows.stop])

    def _num_batches_from(self, start: int, global_rows: int, remainder: Remainder) -> int:
        return self._plan.num_batches(start, global_rows, remainder)

    def _batches(
        self, epoch: Epoch, global_rows: int, remainder: Remainder
    ) -> Generator[Batch, None, None]:
        self._tell_dropped(epoch, global_rows, remainder)
        with ExitStack() as streams:
            sources = _Sources(self._spec, self._rows, self._plan.epoch(epoch.number), streams)
            for positions in self._plan.global_batches(epoch.start, global_rows, remainder):
                share = list(
                    self._plan.batch_share(
                        positions.start, positions.stop, self._world_size, self._rank
                    )
                )
                mine = sum(len(indices) for _, indices in share)
                yield Batch(
                    content=sources.take(share),
                    stop=positions.stop,
                    weight=mine * self._world_size / len(positions),
                )

    def _tell_dropped(self, epoch: Epoch, global_rows: int, remainder: Remainder) -> None:
        dropped = max(0, self._plan.rows - epoch.start) % global_rows
        if remainder == "drop" and dropped and self._rank == 0 and not self._reported_dropped:
            self._reported_dropped = True
            logger.warning(
                "Every epoch of the data set %r leaves out %d of %d rows: they don't fill a batch "
                "of %d.",
                self.name,
                dropped,
                self._plan.rows,
                global_rows,
            )


class _Sources:
    """The canonical shards that a rank reads from during one epoch."""

    def __init__(self, spec: ShardSpec, rows: Rows, epoch: EpochOrder, streams: ExitStack) -> None:
        self._spec = spec
        self._rows = rows
        self._epoch = epoch
        self._open: dict[int, tuple[Order, Stream]] = {}
        self._streams = streams

    def take(self, share: list[tuple[int, range]]) -> list[RowSlice]:
        """These places of these shards, one after another."""
        excerpts: list[RowSlice] = []
        for shard, indices in share:
            order, stream = self._source(shard, indices)
            for picked in order.pick(indices):
                excerpts += stream.take(picked)
        return excerpts or [RowSlice.of(empty_table(self._spec.schema))]

    def _source(self, shard: int, indices: range) -> tuple[Order, Stream]:
        if shard not in self._open:
            order = self._epoch.of_shard(shard)
            if self._spec.group_starts is not None:
                order = OrderOfGroups(order, self._spec.group_starts)
            stream = self._streams.enter_context(self._rows.stream(order, indices.start))
            self._open[shard] = order, stream
        return self._open[shard]
