"""A shard in a trainer: read as a whole, or iterated over in batches, from where a run stands."""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, get_args

import pyarrow as pa

from polytrain.data.cursor import Cursor, Epoch
from polytrain.data.formats import empty_table, to_format
from polytrain.data.order import Order, OrderOfGroups
from polytrain.data.plan import Remainder
from polytrain.data.rows import Rows, Stream
from polytrain.data.spec import ShardSpec
from polytrain_plugins import BatchesAhead, BatchFormat, Shard

logger = logging.getLogger(__name__)

_DEFAULT_BATCH_SIZE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    content: Any
    stop: int
    """Position after it."""

    weight: float


class RowsShard(Shard):
    """One rank's part of a data set whose rows can be had in any order."""

    def __init__(
        self, spec: ShardSpec, rows: Rows, cursor: Cursor, *, world_size: int, rank: int
    ) -> None:
        self.name = spec.name
        self.total_rows = spec.num_rows
        self.cursor = cursor
        self._spec = spec
        self._rows = rows
        self._world_size, self._rank = spec.place(world_size, rank)
        self._share = spec.share(world_size, rank)
        self._told_dropped = False

    def __len__(self) -> int:
        return len(self._share)

    @property
    def schema(self) -> pa.Schema:
        return self._spec.schema

    @property
    def is_whole(self) -> bool:
        """Whether every rank has all rows."""
        return self._spec.whole

    def count(self) -> int:
        """How many rows of this shard are really there."""
        return self._rows.count(self._share)

    def to_arrow(self) -> pa.Table:
        return self._rows.read(self._share)

    def to_pandas(self) -> Any:
        return self.to_arrow().to_pandas()

    def iter_batches(
        self,
        *,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        format: BatchFormat | None = None,
        batch_format: BatchFormat = "numpy",
        drop_last: bool = False,
        prefetch_batches: int = 0,
        convert: Callable[[Any], Any] | None = None,
    ) -> Iterator[Any]:
        batch_rows = self._global_rows(batch_size, global_batch_size)
        wanted = format or batch_format
        if wanted not in get_args(BatchFormat):
            name = "format" if format else "batch_format"
            raise ValueError(f"{name}={wanted!r}: give one of {get_args(BatchFormat)}")
        if prefetch_batches < 0:
            raise ValueError(f"prefetch_batches={prefetch_batches}: give 0 or more")

        def finished(table: pa.Table) -> Any:
            batch = to_format(table, wanted)
            return batch if convert is None else convert(batch)

        return self._iterate(batch_rows, self._remainder(drop_last), finished, prefetch_batches)

    def iter_ahead(
        self,
        *,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        drop_last: bool = False,
    ) -> BatchesAhead:
        batch_rows = self._global_rows(batch_size, global_batch_size)
        remainder = self._remainder(drop_last)
        epoch = self.cursor.next_epoch()
        self._tell_dropped(epoch, batch_rows, remainder)
        batches = self._batches(
            epoch, batch_rows, remainder, lambda table: to_format(table, "numpy")
        )
        return _TakenAhead(epoch, batches)

    def num_batches(
        self,
        *,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        drop_last: bool = False,
    ) -> int:
        batch_rows = self._global_rows(batch_size, global_batch_size)
        start = self.cursor.next_start
        return self._spec.plan.num_batches(start, batch_rows, self._remainder(drop_last))

    def _iterate(
        self,
        batch_rows: int,
        remainder: Remainder,
        finished: Callable[[pa.Table], Any],
        prefetch: int,
    ) -> Iterator[Any]:
        with self.cursor.epoch() as epoch:
            self._tell_dropped(epoch, batch_rows, remainder)
            batches = self._batches(epoch, batch_rows, remainder, finished)
            for batch in _ahead(batches, prefetch) if prefetch else batches:
                # Given is given: whoever reports while handling a batch has used it.
                epoch.given(batch.stop)
                self.gradient_weight = batch.weight
                yield batch.content

    def _batches(
        self,
        epoch: Epoch,
        batch_rows: int,
        remainder: Remainder,
        finished: Callable[[pa.Table], Any],
    ) -> Iterator[_Batch]:
        plan = self._spec.plan
        with ExitStack() as streams:
            sources = _Sources(self._spec, self._rows, epoch.number, streams)
            for positions in epoch.global_batches(batch_rows, remainder):
                share = list(
                    plan.batch_share(positions.start, positions.stop, self._world_size, self._rank)
                )
                mine = sum(len(indices) for _, indices in share)
                yield _Batch(
                    content=finished(sources.table(share)),
                    stop=positions.stop,
                    weight=mine * self._world_size / len(positions),
                )

    def _tell_dropped(self, epoch: Epoch, batch_rows: int, remainder: Remainder) -> None:
        left = max(0, self._spec.plan.rows - epoch.start)
        if remainder == "drop" and left % batch_rows and self._rank == 0 and not self._told_dropped:
            self._told_dropped = True
            logger.warning(
                "Every epoch of the data set %r leaves out %d of %d rows: they don't fill a batch "
                "of %d.",
                self.name,
                left % batch_rows,
                self._spec.plan.rows,
                batch_rows,
            )

    def _remainder(self, drop_last: bool) -> Remainder:
        return "drop" if drop_last else self._spec.remainder

    def _global_rows(self, batch_size: int | None, global_batch_size: int | None) -> int:
        """Rows in a global batch."""
        if batch_size is not None and global_batch_size is not None:
            raise ValueError(
                f"batch_size={batch_size} and global_batch_size={global_batch_size}: give one of "
                "them, rows for each worker or for all together"
            )
        for name, size in (("batch_size", batch_size), ("global_batch_size", global_batch_size)):
            given: Any = size
            if given is not None and not (isinstance(given, int) and given >= 1):
                raise ValueError(f"{name}={size!r}: give a number of rows, at least 1")
        return global_batch_size or (batch_size or _DEFAULT_BATCH_SIZE) * self._world_size


class _TakenAhead(BatchesAhead):
    def __init__(self, epoch: Epoch, batches: Iterator[_Batch]) -> None:
        self._epoch = epoch
        self._batches = batches
        self._stops: deque[int] = deque()
        self._exhausted = False

    def __next__(self) -> Any:
        batch = next(self._batches, None)
        if batch is None:
            self._exhausted = True
            raise StopIteration
        self._stops.append(batch.stop)
        return batch.content

    def used(self, count: int = 1) -> None:
        for _ in range(min(count, len(self._stops))):
            self._epoch.given(self._stops.popleft())
        if self._exhausted and not self._stops:
            self._epoch.end()

    def all_used(self) -> None:
        self.used(len(self._stops))
        self._epoch.end()


class _Sources:
    """The canonical shards that a rank reads from during one epoch."""

    def __init__(self, spec: ShardSpec, rows: Rows, epoch: int, streams: ExitStack) -> None:
        self._spec = spec
        self._rows = rows
        self._epoch = spec.plan.epoch(epoch)
        self._open: dict[int, tuple[Order, Stream]] = {}
        self._streams = streams

    def table(self, share: list[tuple[int, range]]) -> pa.Table:
        """These places of these shards, one after another."""
        tables = []
        for shard, indices in share:
            order, stream = self._source(shard, indices)
            tables += [stream.take(picked) for picked in order.pick(indices)]
        if len(tables) == 1:
            return tables[0]
        return pa.concat_tables(tables) if tables else empty_table(self._spec.schema)

    def _source(self, shard: int, indices: range) -> tuple[Order, Stream]:
        if shard not in self._open:
            order = self._epoch.of_shard(shard)
            if self._spec.group_starts is not None:
                order = OrderOfGroups(order, self._spec.group_starts)
            stream = self._streams.enter_context(self._rows.stream(order, indices.start))
            self._open[shard] = order, stream
        return self._open[shard]


_END = object()


def _ahead(batches: Iterator[_Batch], count: int) -> Iterator[_Batch]:
    """The same batches, prepared on a thread while earlier ones are being used."""
    ready: queue.Queue[Any] = queue.Queue(maxsize=count)
    abandoned = threading.Event()

    def prepare() -> None:
        try:
            for batch in batches:
                ready.put(batch)
                if abandoned.is_set():
                    return
            ready.put(_END)
        except BaseException as error:
            ready.put(error)
        finally:
            batches.close()  # type: ignore[attr-defined]  # it is a generator

    thread = threading.Thread(target=prepare, name="polytrain-prefetch", daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not _END:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        abandoned.set()
        # It may be waiting to put a batch; after that it looks up.
        while not ready.empty():
            ready.get()
        thread.join()
