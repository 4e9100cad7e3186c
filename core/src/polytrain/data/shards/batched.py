"""What all shards have in common: batches in every format, prepared ahead, and counted as given."""

from __future__ import annotations

import queue
import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Literal, get_args

from polytrain.data.plan.cursor import Cursor, Epoch
from polytrain.data.plan.row_plan import Cut, Remainder
from polytrain.data.shards.regions import excerpts_to_format
from polytrain.data.types.columns import to_format
from polytrain.text.plain_values import is_whole
from polytrain_plugins import Batches, BatchesAhead, BatchFormat, Shard
from polytrain_plugins.shard import refuse_local_shuffle

_DEFAULT_BATCH_SIZE = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A batch, and what it means for the position."""

    content: Any
    """Excerpts, or what has been made of them."""

    stop: int
    """Where the epoch stands once it has been given."""

    weight: float
    """See `Shard.gradient_weight`."""


class BatchedShard(Shard):
    """A shard whose subclass says what its batches consist of."""

    def __init__(
        self, *, name: str, cursor: Cursor[Any], remainder: Remainder, world_size: int
    ) -> None:
        self.name = name
        self.cursor = cursor
        self._remainder = remainder
        self._world_size = world_size

    @property
    @abstractmethod
    def is_whole(self) -> bool:
        """Whether every rank has all rows."""

    @abstractmethod
    def count(self) -> int | None:
        """How many rows of this shard are really there; None if nobody knows yet."""

    @abstractmethod
    def _num_batches_from(self, start: int, global_rows: int, cut: Cut) -> int:
        """How many batches an epoch has from this position on.

        Raises:
            TypeError: for a stream of unknown length.
        """

    @abstractmethod
    def _batches(
        self, epoch: Epoch, global_rows: int, cut: Cut, *, least: int = 1
    ) -> Generator[Batch, None, None]:
        """The batches that are left of an epoch, as excerpts.

        Args:
            epoch: which one.
            global_rows: rows in a global batch, at most.
            cut: how the epoch is cut.
            least: rows that the last global batch should have, if it can share those of another.
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
        # A size that is given for all workers mustn't depend on their number.
        least = self._world_size if global_batch_size is None else 1
        wanted = format or ("numpy" if batch_format in (None, "default") else batch_format)
        if wanted not in get_args(BatchFormat):
            name = "format" if format else "batch_format"
            raise ValueError(f"{name}={wanted!r}: give one of {get_args(BatchFormat)}")
        ahead: Any = prefetch_batches
        if not is_whole(ahead) or ahead < 0:
            raise ValueError(
                f"prefetch_batches={prefetch_batches!r}: give a number of batches, 0 or more"
            )

        def finished(batch: Batch) -> Batch:
            content = excerpts_to_format(batch.content, wanted)
            return Batch(
                content=content if convert is None else convert(content),
                stop=batch.stop,
                weight=batch.weight,
            )

        def epoch_of_batches() -> Iterator[Any]:
            with self.cursor.epoch() as epoch:
                batches = self._batches(
                    epoch, global_rows, self._cut(drop_last, shares=not allow_empty), least=least
                )
                for batch in _finished(batches, finished, prefetch_batches):
                    # Given is given: whoever reports while handling a batch has used it.
                    epoch.given(batch.stop)
                    self.gradient_weight = batch.weight
                    yield batch.content

        def length() -> int:
            return self._num_batches_from(0, global_rows, self._cut(drop_last))

        return Batches(epoch_of_batches, length)

    def num_batches(
        self,
        *,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        drop_last: bool = False,
    ) -> int:
        global_rows = self._global_rows(batch_size, global_batch_size)
        return self._num_batches_from(self.cursor.next_start, global_rows, self._cut(drop_last))

    def iter_ahead(
        self,
        *,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        drop_last: bool = False,
    ) -> BatchesAhead:
        global_rows = self._global_rows(batch_size, global_batch_size)
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
        """Rows in a global batch."""
        if batch_size is not None and global_batch_size is not None:
            raise ValueError(
                f"batch_size={batch_size} and global_batch_size={global_batch_size}: give one of "
                "them, rows for each worker or for all together"
            )
        for name, size in (("batch_size", batch_size), ("global_batch_size", global_batch_size)):
            if size is not None and not (is_whole(size) and size >= 1):
                raise ValueError(f"{name}={size!r}: give a number of rows, at least 1")
        if global_batch_size is not None:
            return int(global_batch_size)
        return int(batch_size or _DEFAULT_BATCH_SIZE) * self._world_size


class _TakenAhead(BatchesAhead):
    def __init__(self, epoch: Epoch, batches: Iterator[Batch]) -> None:
        self._epoch = epoch
        self._batches = batches
        self._next = next(batches, None)
        self._stops: deque[int] = deque()

    def __next__(self) -> Any:
        batch = self._next
        if batch is None:
            if not self._stops:
                # A restart may have gone on where nothing was left: the epoch begins, and is over.
                self._epoch.given(self._epoch.start)
                self._epoch.end()
            raise StopIteration
        self._stops.append(batch.stop)
        content = excerpts_to_format(batch.content, "numpy")
        # Whether there is another must be known before this one is used: a checkpoint that is made
        # then goes on with the next epoch if there is none.
        self._next = next(self._batches, None)
        return content

    def used(self, count: int = 1) -> None:
        for _ in range(min(count, len(self._stops))):
            self._epoch.given(self._stops.popleft())
        if self._next is None and not self._stops:
            self._epoch.end()

    def all_used(self) -> None:
        self.used(len(self._stops))
        self._epoch.end()


_END = object()


def _finished(
    batches: Generator[Batch, None, None], finish: Callable[[Batch], Batch], ahead: int
) -> Iterator[Batch]:
    """Batches in the form that is asked for, so many of them prepared while others are used."""
    with closing(batches):
        if not ahead:
            yield from map(finish, batches)
            return
        yield from _prepared(batches, finish, ahead)


def _prepared(
    batches: Iterator[Batch], finish: Callable[[Batch], Batch], count: int
) -> Iterator[Batch]:
    ready: queue.Queue[Any] = queue.Queue(maxsize=count)
    abandoned = threading.Event()

    def prepare() -> None:
        try:
            for batch in batches:
                ready.put(finish(batch))
                if abandoned.is_set():
                    return
            ready.put(_END)
        except BaseException as error:
            ready.put(error)

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
