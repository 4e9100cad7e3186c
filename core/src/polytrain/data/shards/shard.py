"""Batches of a shard: in every format, prepared ahead, and counted when they are given."""

from __future__ import annotations

import queue
import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal, get_args

from polytrain.data.plan.cursor import Cursor, Epoch
from polytrain.data.plan.row_plan import Cut, Remainder
from polytrain.data.shards.decoded import TableRows, to_batch
from polytrain.data.types.columns import to_format
from polytrain.text.described import is_whole
from polytrain_plugins import Batches, BatchesAhead, BatchFormat, MicroBatch, Shard, VirtualBatch
from polytrain_plugins.shard import refuse_local_shuffle

_DEFAULT_BATCH_SIZE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class UnformattedBatch:
    """The rows of a rank's batch, and the position after it."""

    parts: list[TableRows]

    start: int = 0
    """The position in the epoch of the global batch's first row."""

    stop: int
    """The position in the epoch once the batch has been given."""

    weight: float
    """See `Shard.gradient_weight`."""


class _Threads(deque[threading.Thread]):
    """Threads of this process; a shard that is copied to another one, or here, has none."""

    def __reduce__(self) -> Any:
        return _Threads, ()


class BatchedShard(Shard):
    """A shard whose subclass chooses the rows of its batches."""

    def __init__(
        self,
        *,
        name: str,
        cursor: Cursor[Any],
        remainder: Remainder,
        world_size: int,
        virtual_workers: range | None = None,
    ) -> None:
        """
        Args:
            world_size: number of ranks, or of virtual workers, that share a global batch.
            virtual_workers: those that this rank stands for, if there are any.
        """
        self.name = name
        self._virtual_workers = virtual_workers
        self.cursor = cursor
        self._remainder = remainder
        self._world_size = world_size
        self._left = _Threads()
        """Those of loops that are over; one that was left may still prepare a batch."""

    @property
    @abstractmethod
    def is_whole(self) -> bool:
        """Whether every rank has all rows."""

    @abstractmethod
    def count(self) -> int | None:
        """Return how many rows of this shard exist; None if that is not known yet."""

    @abstractmethod
    def _num_batches_from(
        self,
        start: int,
        global_rows: int,
        cut: Cut,
        *,
        least: int = 1,
        skipped: Sequence[range] = (),
    ) -> int:
        """Return the number of batches from a position to the epoch's end, but for skipped ones.

        Raises:
            TypeError: for a stream of unknown length.
        """

    @abstractmethod
    def _batches(
        self, epoch: Epoch, global_rows: int, cut: Cut, *, least: int = 1
    ) -> Generator[UnformattedBatch, None, None]:
        """Yield the remaining batches of an epoch; with virtual workers each global batch as this
        rank's micro-batches, from the last virtual worker to the first.

        Args:
            least: number of rows that the last global batch should have; see `Plan.batch_stop`.
        """

    def to_pandas(self) -> Any:
        return to_format(self.to_arrow(), "pandas")

    def iter_batches(
        self,
        *,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        format: BatchFormat | None = None,
        batch_format: BatchFormat | Literal["default"] | None = "numpy",
        drop_last: bool = False,
        prefetch_batches: int = 0,
        convert: Callable[[Any], Any] | None = None,
        allow_empty: bool = False,
        local_shuffle_buffer_size: None = None,
        local_shuffle_seed: None = None,
    ) -> Batches:
        refuse_local_shuffle(local_shuffle_buffer_size, local_shuffle_seed)
        global_rows = self._global_rows(batch_size, global_batch_size)
        least = self._least(global_batch_size)
        wanted = format or ("numpy" if batch_format in (None, "default") else batch_format)
        if wanted not in get_args(BatchFormat):
            name = "format" if format else "batch_format"
            raise ValueError(f"{name}={wanted!r}: give one of {get_args(BatchFormat)}")
        ahead: Any = prefetch_batches
        if not is_whole(ahead) or ahead < 0:
            raise ValueError(
                f"prefetch_batches={prefetch_batches!r}: give a number of batches, 0 or more"
            )

        def formatted(batch: UnformattedBatch) -> tuple[Any, UnformattedBatch]:
            content = to_batch(batch.parts, wanted)
            content = content if convert is None else convert(content)
            # Its rows may be much memory.
            return content, replace(batch, parts=[])

        def epoch_of_batches() -> Iterator[Any]:
            cut = self._cut(drop_last, shares=not allow_empty)
            self._wait_for_left()
            with (
                self.cursor.epoch() as epoch,
                closing(
                    _prefetched(
                        self._batches(epoch, global_rows, cut, least=least),
                        formatted,
                        prefetch_batches,
                        self._left,
                    )
                ) as ready,
            ):
                for content, batch in self._global_batches(ready, epoch):
                    # A batch counts once it is given: a report in its step includes it.
                    epoch.given(batch.stop)
                    self.gradient_weight = batch.weight
                    yield content

        def length() -> int:
            return self._num_batches_from(0, global_rows, self._cut(drop_last))

        return Batches(epoch_of_batches, length)

    def _wait_for_left(self) -> None:
        """Wait until nothing is prepared any more for loops that were left."""
        while self._left:
            self._left[0].join()
            self._left.popleft()

    def _global_batches(
        self, batches: Iterator[tuple[Any, UnformattedBatch]], epoch: Epoch
    ) -> Iterator[tuple[Any, UnformattedBatch]]:
        """Join the micro-batches of each global batch, if there are virtual workers."""
        if self._virtual_workers is None:
            yield from batches
            return
        workers = self._virtual_workers[::-1]
        while some := [*islice(batches, len(workers))]:
            start = some[0][1].start
            yield (
                VirtualBatch(
                    micro_batches=tuple(
                        MicroBatch(virtual_worker=worker, content=content, weight=batch.weight)
                        for worker, (content, batch) in zip(workers, some, strict=True)
                    ),
                    place=f"{self.name} {epoch.number} {start}",
                ),
                some[0][1],
            )

    def num_batches(
        self,
        *,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        drop_last: bool = False,
    ) -> int:
        epoch = self.cursor.next_epoch()
        return self._num_batches_from(
            epoch.start,
            self._global_rows(batch_size, global_batch_size),
            self._cut(drop_last, shares=True),
            least=self._least(global_batch_size),
            skipped=epoch.skipped,
        )

    def _least(self, global_batch_size: int | None) -> int:
        """Return how many rows a global batch should have at least."""
        # A size that is given for all workers mustn't depend on their number.
        return self._world_size if global_batch_size is None else 1

    def iter_ahead(
        self,
        *,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        drop_last: bool = False,
    ) -> BatchesAhead:
        global_rows = self._global_rows(batch_size, global_batch_size)
        self._wait_for_left()
        epoch = self.cursor.next_epoch()
        # Frameworks that take batches ahead fail on empty ones.
        least = self._world_size if global_batch_size is None else -(-global_rows // 2)
        batches = self._batches(epoch, global_rows, self._cut(drop_last, shares=True), least=least)
        return _TakenAhead(epoch, batches)

    def _cut(self, drop_last: bool, *, shares: bool = False) -> Cut:
        if drop_last:
            return "drop"
        return "share" if shares and self._remainder == "keep" else self._remainder

    def _global_rows(self, batch_size: int | None, global_batch_size: int | None) -> int:
        """Check the sizes and return the number of rows in a global batch."""
        if batch_size is not None and global_batch_size is not None:
            raise ValueError(
                f"batch_size={batch_size} and global_batch_size={global_batch_size}: give one of "
                "them, rows for each worker or for all together"
            )
        for name, size in (("batch_size", batch_size), ("global_batch_size", global_batch_size)):
            if size is not None and not (is_whole(size) and size >= 1):
                raise ValueError(f"{name}={size!r}: give a number of rows, at least 1")
        if global_batch_size is not None:
            if self._virtual_workers is not None:
                check_divides(self._world_size, global_batch_size)
            return int(global_batch_size)
        return int(batch_size or _DEFAULT_BATCH_SIZE) * self._world_size


def check_divides(virtual_workers: int, global_batch_size: int) -> None:
    """Check that virtual workers can have equal parts of a global batch.

    Raises:
        ValueError: they can't; the message names sizes with which they can.
    """
    if global_batch_size % virtual_workers:
        less = global_batch_size // virtual_workers * virtual_workers
        sizes = f"{less} or {less + virtual_workers}" if less else f"{virtual_workers}"
        raise ValueError(
            f"global_batch_size={global_batch_size}: {virtual_workers} virtual workers can't have "
            f"equal parts of it, which bits depend on. Give a multiple, such as {sizes}"
        )


class _TakenAhead(BatchesAhead):
    def __init__(self, epoch: Epoch, batches: Iterator[UnformattedBatch]) -> None:
        self._epoch = epoch
        self._batches = batches
        self._next = next(batches, None)
        self._stops: deque[int] = deque()

    def __next__(self) -> Any:
        batch = self._next
        if batch is None:
            if not self._stops:
                # A restart may have resumed at the epoch's end: it begins, and is over.
                self._epoch.given(self._epoch.start)
                self._epoch.end()
            raise StopIteration
        self._stops.append(batch.stop)
        content = to_batch(batch.parts, "numpy")
        # The end of the epoch must be known before the last batch is used: a checkpoint that is
        # made then resumes with the next epoch.
        self._next = next(self._batches, None)
        return content

    def used(self, count: int = 1) -> None:
        for _ in range(min(count, len(self._stops))):
            self._epoch.given(self._stops.popleft())
        if self._next is None and not self._stops:
            self._epoch.end()

    def all_used(self) -> None:
        if not self._epoch.end_looked_ahead():
            self.used(len(self._stops))
            self._epoch.end()


_END = object()


def _prefetched(
    batches: Generator[UnformattedBatch, None, None],
    prepare: Callable[[UnformattedBatch], Any],
    count: int,
    left: deque[threading.Thread],
) -> Generator[Any, None, None]:
    """Prepare so many batches ahead, on a thread; close their source at the end.

    Args:
        left: gets the thread, for which this doesn't wait.
    """
    if not count:
        with closing(batches):
            yield from map(prepare, batches)
        return
    ready: queue.SimpleQueue[Any] = queue.SimpleQueue()
    taken: queue.SimpleQueue[None] = queue.SimpleQueue()
    is_left = False

    def take() -> None:
        try:
            with closing(batches):
                for number, item in enumerate(map(prepare, batches)):
                    if number >= count:
                        taken.get()
                    if is_left:
                        return
                    ready.put(item)
            ready.put(_END)
        except BaseException as error:
            ready.put(error)

    thread = threading.Thread(target=take, name="polytrain-prefetch", daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not _END:
            if isinstance(item, BaseException):
                raise item
            taken.put(None)
            yield item
    finally:
        # An iterator that was left may be collected while Python starts a thread, and holds the
        # lock without which none ends. The next loop waits for this one. These queues, unlike
        # `queue.Queue`, may be used in a collection, which interrupts a thread anywhere.
        is_left = True
        taken.put(None)
        left.append(thread)
