"""A shard of rows that can be read in any order: as a whole, or in batches by the plan."""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from functools import cache

import numpy as np
import pyarrow as pa

from polytrain.data.plan.cursor import Cursor, Epoch
from polytrain.data.plan.order import GroupOrder, ShardOrder
from polytrain.data.plan.position import DataPosition
from polytrain.data.plan.row_plan import Cut, EpochOrder
from polytrain.data.shards.decoded import TableRows, to_batch
from polytrain.data.shards.rows import AnyOrder, ReadableRows
from polytrain.data.shards.shard import BatchedShard, UnformattedBatch
from polytrain.data.shards.spec import ShardSpec
from polytrain.data.types.columns import empty_table

logger = logging.getLogger(__name__)


class RowsShard(BatchedShard):
    """One rank's part of a data set that a plan divides."""

    def __init__(
        self,
        spec: ShardSpec,
        rows: ReadableRows,
        cursor: Cursor[DataPosition],
        *,
        world_size: int,
        rank: int,
    ) -> None:
        count, parts = spec.places(world_size, rank)
        super().__init__(
            name=spec.name,
            cursor=cursor,
            remainder=spec.remainder,
            world_size=count,
            virtual_workers=None if spec.virtual_workers is None or spec.whole else parts,
        )
        self.total_rows = spec.num_rows
        self._spec = spec
        self._plan = cursor.position.plan
        cursor.begins_anywhere = cursor.skips = True
        self._rows = rows
        self._parts = parts
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
        return len(self) if self._plan.mix is not None else self._rows.count(self._share)

    def to_arrow(self) -> pa.Table:
        return self.read(range(len(self._share)))

    def read(self, rows: range) -> pa.Table:
        return self._read(self._share[rows.start : rows.stop])

    def padding_row(self) -> pa.Table:
        # An empty share, too, begins in a canonical shard that this rank can read.
        return self._read(range(self._share.start, self._share.start + 1))

    def _read(self, wanted: range) -> pa.Table:
        table = self._rows.read(wanted) if self._plan.mix is None else self._first_rows(wanted)
        if self._spec.transform is None:
            return table
        key = self._plan.seed, wanted.start
        return self._spec.transform.of(table, f"rows {wanted.start} to {wanted.stop - 1}", *key)

    def _first_rows(self, positions: range) -> pa.Table:
        """Read the rows of a mix at these positions of the first epoch."""
        if not positions:
            return empty_table(self._spec.schema)
        with self._rows.reading(self._plan.epoch(0).of_shard) as take:
            place = positions.start, positions.stop, 1, 0
            share, order = self._plan.batch_share(*place), self._plan.batch_order(*place)
            return to_batch(take([*share], order), "arrow")

    def _num_batches_from(
        self,
        start: int,
        global_rows: int,
        cut: Cut,
        *,
        least: int = 1,
        skipped: Sequence[range] = (),
    ) -> int:
        return self._plan.num_batches(start, global_rows, cut, least=least, skipped=skipped)

    def _batches(
        self, epoch: Epoch, global_rows: int, cut: Cut, *, least: int = 1
    ) -> Generator[UnformattedBatch, None, None]:
        self._warn_of_dropped(epoch, global_rows, cut)
        plan, world_size, starts = self._plan, self._world_size, self._spec.group_starts
        orders = plan.epoch(epoch.number)

        @cache
        def order_of(shard: int) -> AnyOrder:
            order = orders.of_shard(shard)
            return (
                GroupOrder(order, starts)
                if isinstance(order, ShardOrder) and starts is not None
                else order
            )

        with self._rows.reading(order_of) as take:
            for positions in plan.global_batches(
                epoch.start, global_rows, cut, least=least, skipped=epoch.skipped
            ):
                start, stop = positions.start, positions.stop
                global_count = self._global_rows_at(positions, orders)
                # In order: the rows of one canonical shard may be in several parts.
                taken = [
                    take(
                        [*plan.batch_share(start, stop, world_size, part)],
                        plan.batch_order(start, stop, world_size, part),
                    )
                    for part in self._parts
                ]
                for part, tables in reversed([*zip(self._parts, taken, strict=True)]):
                    rows = sum(map(len, tables))
                    tables = tables or [TableRows.of(empty_table(self._spec.schema))]
                    yield UnformattedBatch(
                        parts=self._transformed(tables, epoch.number, start, part),
                        start=start,
                        stop=stop,
                        weight=rows * world_size / global_count,
                    )

    def _transformed(
        self, parts: list[TableRows], epoch: int, start: int, rank: int
    ) -> list[TableRows]:
        if self._spec.transform is None:
            return parts
        where = f"rank {rank}'s rows from position {start} of epoch {epoch}"
        key = self._plan.seed, epoch, start, rank
        return [TableRows.of(self._spec.transform.of(to_batch(parts, "arrow"), where, *key))]

    def _global_rows_at(self, positions: range, orders: EpochOrder) -> int:
        """Number of rows in a global batch, over all ranks."""
        starts = self._spec.group_starts
        if starts is None:
            return len(positions)
        groups = [
            np.asarray(selection.rows)
            for shard, indices in self._plan.batch_share(positions.start, positions.stop, 1, 0)
            for selection in orders.of_shard(shard).select(indices)
        ]
        chosen = np.concatenate(groups)
        return int((starts[chosen + 1] - starts[chosen]).sum())

    def _warn_of_dropped(self, epoch: Epoch, global_rows: int, cut: Cut) -> None:
        dropped = max(0, self._plan.rows - epoch.start) % global_rows
        if cut == "drop" and dropped and self._parts[0] == 0 and not self._reported_dropped:
            self._reported_dropped = True
            logger.warning(
                "Every epoch of the data set %r leaves out %d of %d rows: they don't fill a batch "
                "of %d.",
                self.name,
                dropped,
                self._plan.rows,
                global_rows,
            )
