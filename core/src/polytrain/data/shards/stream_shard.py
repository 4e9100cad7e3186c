"""A shard of a stream, which can only be read once, from its start, and whose length is unknown.

A rank's rows of an epoch come in parts. All ranks get equally many rows, give or take one at the
end, so each rank cuts its own rows into batches without knowing of the others.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from typing import NoReturn

import pyarrow as pa

from polytrain.data.plan.cursor import Cursor, Epoch
from polytrain.data.plan.position import StreamPosition
from polytrain.data.plan.row_plan import Cut
from polytrain.data.plan.stream_partitioner import Segment, rank_total
from polytrain.data.shards.decoded import TableRows
from polytrain.data.shards.shard import BatchedShard, UnformattedBatch
from polytrain.data.shards.spec import StreamSpec
from polytrain.data.types.columns import empty_table
from polytrain.data.types.schemas import in_one_piece
from polytrain.data_errors import too_few
from polytrain.errors import BadDataError
from polytrain.linux.progress_page import WorkerStage, during

_WHOLE = -1
"""The number of the epoch that is read if the shard is read as a whole."""


class PartSource(ABC):
    """Gives the parts of a rank."""

    @abstractmethod
    def begin(self, epoch: int, segments: Sequence[Segment]) -> None:
        """Begin an epoch, after the segments of it that were consumed."""

    @abstractmethod
    def next_part(self, epoch: int, index: int) -> pa.Table | int:
        """Return the next part; after the last one, the number of rows of all ranks together.

        Raises:
            StreamLostError: the stream failed.
        """


class StreamShard(BatchedShard):
    """One rank's part of a stream."""

    total_rows = None

    def __init__(
        self,
        spec: StreamSpec,
        parts: PartSource,
        cursor: Cursor[StreamPosition],
        *,
        world_size: int,
        rank: int,
    ) -> None:
        super().__init__(
            name=spec.name, cursor=cursor, remainder=spec.remainder, world_size=world_size
        )
        self._spec = spec
        self._parts = _KeptParts(parts)
        self._rank = rank
        self._whole: pa.Table | None = None

    def __len__(self) -> int:
        self._refuse("its length")

    def schema(self) -> pa.Schema:
        return self._spec.schema

    @property
    def is_whole(self) -> bool:
        return False

    def count(self) -> None:
        return None

    def to_arrow(self) -> pa.Table:
        if self._whole is None:
            self._wait_for_left()
            self._parts.begin(_WHOLE, ())
            self._parts.forget()
            with _Buffer(self._parts, _WHOLE, self._spec.schema) as rows:
                rows.fill(None)
                self._whole = in_one_piece(rows.take(len(rows)))
        return self._whole

    def _num_batches_from(
        self,
        start: int,
        global_rows: int,
        cut: Cut,
        *,
        least: int = 1,
        skipped: Sequence[range] = (),
    ) -> int:
        self._refuse("how many batches it gives")

    def _refuse(self, what: str) -> NoReturn:
        raise TypeError(
            f"The data set {self.name!r} streams while it is computed: {what} is not known before "
            "its end. Pass dataset.materialize() to have it computed first."
        )

    def _batches(
        self, epoch: Epoch, global_rows: int, cut: Cut, *, least: int = 1
    ) -> Generator[UnformattedBatch, None, None]:
        position = self.cursor.position
        segments = position.segments if position.epoch == epoch.number else ()
        self._parts.begin(epoch.number, segments)
        start = epoch.start
        last = empty_table(self._spec.schema)
        with _Buffer(self._parts, epoch.number, self._spec.schema) as rows:
            while True:
                if self.cursor.has_begun(epoch):
                    self._parts.forget()
                size = self._size(start, global_rows)
                # The size of a batch depends on whether its rows are the last ones.
                rows.fill(2 * size)
                if rows.total is not None and not segments:
                    self._check_enough(rows.total)
                stop = self._batch_stop(start, size, rows, cut)
                if stop == start:
                    return
                mine = rows.take(stop - start)
                weight = self._weight(start, stop, rows.total)
                if cut == "pad" and len(mine) < size:
                    # Another rank may have one row more, and this one none at all.
                    some = mine if len(mine) else last
                    repeats = [mine, *[some] * -(-size // max(1, len(some)))]
                    mine = pa.concat_tables(repeats).slice(0, size)
                last = mine
                yield UnformattedBatch(parts=[TableRows.of(mine)], stop=stop, weight=weight)
                start = stop

    def _size(self, start: int, global_rows: int) -> int:
        """Return a rank's rows in the batch that begins at its row `start`, the same on every rank.

        If the number of ranks doesn't divide a global batch, batches differ by a row, so that a
        global batch has the requested size on average.
        """
        number = -(-start * self._world_size // global_rows)
        return max(1, (number + 1) * global_rows // self._world_size - start)

    def _check_enough(self, rows: int) -> None:
        """Refuse to train on an epoch that leaves a rank without rows, as for other data sets."""
        if self.name == "train" and rows < self._world_size:
            raise BadDataError((too_few(self.name, rows, "row", self._world_size),))

    def _batch_stop(self, start: int, size: int, rows: _Buffer, cut: Cut) -> int:
        """Return the end of the next batch in a rank's rows, the same on every rank."""
        if rows.total is None:
            return start + size
        most = rank_total(rows.total, self._world_size, 0) - start
        least = rank_total(rows.total, self._world_size, self._world_size - 1) - start
        if cut == "drop":
            return start + size if least >= size else start
        if most >= 2 * size or cut != "share":
            return start + min(size, most)
        # The last two batches are as even as possible.
        batches = -(-most // size)
        return start + (-(-most // batches) if batches else 0)

    def _weight(self, start: int, stop: int, total: int | None) -> float:
        if total is None:
            return 1.0
        totals = [rank_total(total, self._world_size, rank) for rank in range(self._world_size)]
        shares = [max(0, min(rows, stop) - start) for rows in totals]
        return shares[self._rank] * self._world_size / max(1, sum(shares))


class _KeptParts(PartSource):
    """Parts that can be fetched once, kept until the epoch has really begun.

    A framework that takes batches ahead may discard them, and begin the same epoch again.
    """

    def __init__(self, parts: PartSource) -> None:
        self._parts = parts
        self._begun: tuple[int, tuple[Segment, ...]] | None = None
        self._kept: list[pa.Table | int] | None = []
        self._lock = threading.Lock()
        self.left: deque[Future[pa.Table | int]] = deque()
        """Fetches of iterators that were left, which may be under way."""

    def begin(self, epoch: int, segments: Sequence[Segment]) -> None:
        while self.left:
            with suppress(CancelledError):
                self.left[0].exception()
            self.left.popleft()
        with self._lock:
            if self._kept is not None and self._begun == (epoch, tuple(segments)):
                return
            self._begun, self._kept = (epoch, tuple(segments)), []
            self._parts.begin(epoch, segments)

    def next_part(self, epoch: int, index: int) -> pa.Table | int:
        with self._lock:
            kept = self._kept
            if kept is None or self._begun is None or self._begun[0] != epoch:
                return self._parts.next_part(epoch, index)
            if index == len(kept):
                kept.append(self._parts.next_part(epoch, index))
            return kept[index]

    def forget(self) -> None:
        """Drop the kept parts: the epoch has begun."""
        self._kept = None


class _Buffer:
    """A rank's rows of an epoch that have come so far. The next part is being fetched."""

    def __init__(self, parts: _KeptParts, epoch: int, schema: pa.Schema) -> None:
        self._parts = parts
        self._epoch = epoch
        self._index = 0
        self._table = empty_table(schema)
        self._fetcher = ThreadPoolExecutor(1, thread_name_prefix="polytrain-stream")
        self._next = self._fetch()
        self.total: int | None = None
        """Number of rows of all ranks, once the end has come."""

    def __enter__(self) -> _Buffer:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        # The next epoch waits for the fetch. An iterator that was left may be collected while
        # Python starts a thread, and holds the lock that is needed to wait for another one's end.
        self._parts.left.append(self._next)
        self._fetcher.shutdown(wait=kind is None, cancel_futures=True)

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def fill(self, rows: int | None) -> None:
        """Wait for so many rows, or for all."""
        tables = [self._table]
        have = self._table.num_rows
        while self.total is None and (rows is None or have < rows):
            with during(WorkerStage.WAITING_FOR_DATA):
                part = self._next.result()
            if isinstance(part, int):
                self.total = part
            else:
                self._next = self._fetch()
                tables.append(part)
                have += part.num_rows
        self._table = pa.concat_tables(tables)

    def take(self, rows: int) -> pa.Table:
        """Remove the first `rows` rows, or all if there are fewer."""
        taken = self._table.slice(0, rows)
        self._table = self._table.slice(rows)
        return taken

    def _fetch(self) -> Future[pa.Table | int]:
        index, self._index = self._index, self._index + 1
        return self._fetcher.submit(self._parts.next_part, self._epoch, index)
