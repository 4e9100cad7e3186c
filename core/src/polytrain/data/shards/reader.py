"""A shard whose rows can be had in any order: as a whole, or in batches by the plan."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Sequence
from itertools import chain, groupby
from typing import Any

import numpy as np
import pyarrow as pa

from polytrain.data.plan.cursor import Cursor, Epoch
from polytrain.data.plan.order import Order, OrderOfGroups
from polytrain.data.plan.position import DataPosition
from polytrain.data.plan.row_plan import Cut, EpochOrder, Plan
from polytrain.data.shards.batched import Batch, BatchedShard
from polytrain.data.shards.regions import Excerpt, RowSlice, excerpts_to_format
from polytrain.data.shards.rows import Rows, Stream
from polytrain.data.shards.spec import ShardSpec
from polytrain.data.types.columns import empty_table

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

    def schema(self) -> pa.Schema:
        transform = self._spec.transform
        return self._spec.schema if transform is None else transform.schema

    @property
    def is_whole(self) -> bool:
        return self._spec.whole

    def count(self) -> int:
        return self._rows.count(self._share)

    def to_arrow(self) -> pa.Table:
        return self.read(range(len(self._share)))

    def read(self, rows: range) -> pa.Table:
        wanted = self._share[rows.start : rows.stop]
        table = self._rows.read(wanted)
        if self._spec.transform is None:
            return table
        key = self._plan.seed, wanted.start
        return self._spec.transform.of(table, f"rows {wanted.start} to {wanted.stop - 1}", *key)

    def _num_batches_from(self, start: int, global_rows: int, cut: Cut) -> int:
        return self._plan.num_batches(start, global_rows, cut)

    def _batches(
        self, epoch: Epoch, global_rows: int, cut: Cut, *, least: int = 1
    ) -> Generator[Batch, None, None]:
        self._tell_dropped(epoch, global_rows, cut)
        with self._rows.streams() as open_stream:
            sources = _Sources(self._spec, self._plan.epoch(epoch.number), open_stream)
            rows = _RowCount(self._plan, epoch.number, self._spec.group_starts)
            for positions in self._plan.global_batches(epoch.start, global_rows, cut, least=least):
                share = list(
                    self._plan.batch_share(
                        positions.start, positions.stop, self._world_size, self._rank
                    )
                )
                yield Batch(
                    content=self._content(sources.take(share), epoch.number, positions),
                    stop=positions.stop,
                    weight=rows.of_share(share) * self._world_size / rows.of_batch(positions),
                )

    def _content(self, excerpts: list[Excerpt], epoch: int, positions: range) -> Sequence[Excerpt]:
        if self._spec.transform is None:
            return excerpts
        table = excerpts_to_format(excerpts, "arrow")
        where = f"rank {self._rank}'s rows from position {positions.start} of epoch {epoch}"
        key = self._plan.seed, epoch, positions.start, self._rank
        return [RowSlice.of(self._spec.transform.of(table, where, *key))]

    def _tell_dropped(self, epoch: Epoch, global_rows: int, cut: Cut) -> None:
        dropped = max(0, self._plan.rows - epoch.start) % global_rows
        if cut == "drop" and dropped and self._rank == 0 and not self._reported_dropped:
            self._reported_dropped = True
            logger.warning(
                "Every epoch of the data set %r leaves out %d of %d rows: they don't fill a batch "
                "of %d.",
                self.name,
                dropped,
                self._plan.rows,
                global_rows,
            )


class _RowCount:
    """How many rows there are at places of an epoch: with groups, these have several each."""

    def __init__(self, plan: Plan, epoch: int, group_starts: np.ndarray[Any, Any] | None) -> None:
        self._plan = plan
        self._order = plan.epoch(epoch)
        self._sizes = None if group_starts is None else np.diff(group_starts)

    def of_share(self, share: Iterable[tuple[int, range]]) -> int:
        """At these places of these canonical shards."""
        if self._sizes is None:
            return sum([len(indices) for _, indices in share])
        count = 0
        for shard, indices in share:
            for picked in self._order.of_shard(shard).pick(indices):
                rows = picked.rows
                if isinstance(rows, range):
                    count += int(self._sizes[rows.start : rows.stop].sum())
                else:
                    count += int(self._sizes[rows].sum())
        return count

    def of_batch(self, positions: range) -> int:
        """In a global batch, over all ranks."""
        if self._sizes is None:
            return len(positions)
        return self.of_share(self._plan.batch_share(positions.start, positions.stop, 1, 0))


class _Sources:
    """The canonical shards that a rank reads from during one epoch."""

    def __init__(
        self, spec: ShardSpec, epoch: EpochOrder, open_stream: Callable[[Order, int], Stream]
    ) -> None:
        self._spec = spec
        self._epoch = epoch
        self._open: dict[int, tuple[Order, Stream]] = {}
        self._open_stream = open_stream

    def take(self, share: list[tuple[int, range]]) -> list[Excerpt]:
        """These places of these shards, one after another."""
        opened = [(self._source(shard, indices), indices) for shard, indices in share]
        excerpts: list[Excerpt] = []
        if len(opened) == 1:
            # Most workers have one shard: without what several need.
            [((order, stream), indices)] = opened
            excerpts = stream.take_all([*order.pick(indices)])
        else:
            for stream, parts in groupby(opened, key=lambda part: part[0][1]):
                picked = (order.pick(indices) for (order, _), indices in parts)
                excerpts += stream.take_all([*chain.from_iterable(picked)])
        return excerpts or [RowSlice.of(empty_table(self._spec.schema))]

    def _source(self, shard: int, indices: range) -> tuple[Order, Stream]:
        if shard not in self._open:
            order = self._epoch.of_shard(shard)
            if self._spec.group_starts is not None:
                order = OrderOfGroups(order, self._spec.group_starts)
            self._open[shard] = order, self._open_stream(order, indices.start)
        return self._open[shard]
