"""Samplers that yield a rank's items of an epoch, and know their position in it.

A loader that reads its whole data set in order, or shuffled, uses the core's plan: the same global
batches on any number of workers. With a custom sampler, items are drawn from it.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from itertools import chain, cycle, islice
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler, Sampler

from polytrain import heartbeat
from polytrain.extension import Cursor, DataPosition, Epoch
from polytrain_torch.collectives.call_agreement import agree_on_call
from polytrain_torch.collectives.gathering import from_rank_0
from polytrain_torch.loaders.users_samplers import (
    has_length,
    length_of,
    passes_of,
    samplers_in,
    set_epochs_in,
)
from polytrain_torch.randomness import (
    RandomStream,
    generators_of,
    seed_generator,
    seed_of,
    seed_place,
)
from polytrain_torch.virtual_workers import current

logger = logging.getLogger(__name__)

Cut = Literal["keep", "share", "drop"]
"""A partial last global batch is kept, gets rows from the one before ("share"), or is dropped."""


class Stop(NamedTuple):
    """The epoch's position after a batch, and the weight of the batch's gradients."""

    position: int
    """Position in the epoch after the batch."""

    weight: float = 1.0
    """See `Shard.gradient_weight`."""

    start: int = 0
    """Position of the global batch."""

    virtual_worker: int = 0
    """The virtual worker that computes the batch, if there are any."""


class EpochSampler(Sampler[Any]):
    """Yields this rank's items of an epoch, and records the position after each batch.

    A data loader requests items long before it returns them, so the code that takes batches from
    the loader counts them.
    """

    def __init__(self, cursor: Cursor[DataPosition]) -> None:
        self.cursor = cursor
        self.epoch: Epoch | None = None
        self.stops: deque[Stop] = deque()

    def begin(self, epoch: Epoch) -> None:
        """Use this epoch in the next iteration."""
        self.epoch = epoch
        # An earlier iteration that isn't over keeps its own deque.
        self.stops = deque()

    @abstractmethod
    def length_from(self, start: int, *, skipped: Sequence[range] = ()) -> int:
        """Return the number of this rank's items from a position to an epoch's end.

        Positions in `skipped` are left out; see `Plan.global_batches`.
        """

    def __len__(self) -> int:
        return self.length_from(0)


class PlannedBatches(EpochSampler):
    """Yields the row indices of this rank's batches, by the plan that shards use too."""

    def __init__(
        self,
        cursor: Cursor[DataPosition],
        *,
        batch_size: int,
        cut: Cut,
    ) -> None:
        super().__init__(cursor)
        self._size, self._parts = division()
        self._batch_rows = batch_size * self._size
        self._cut = cut
        cursor.begins_anywhere = cursor.skips = True

    def __iter__(self) -> Iterator[list[int]]:
        assert self.epoch is not None
        epoch, stops = self.epoch, self.stops
        plan = self.cursor.position.plan
        order = plan.epoch(epoch.number)
        size = self._size
        # A loop without gradients doesn't weight rows, and needs each row exactly once.
        is_whole = self._cut == "keep" and not torch.is_grad_enabled()
        cut: Cut = "share" if is_whole else self._cut
        for positions in plan.global_batches(
            epoch.start, self._batch_rows, cut, least=size, skipped=epoch.skipped
        ):
            start, stop = positions.start, positions.stop
            for part in reversed(self._parts):
                mine = [
                    int(row)
                    for shard, indices in plan.batch_share(start, stop, size, part)
                    for selection in order.of_shard(shard).select(indices)
                    for row in selection.rows
                ]
                stops.append(Stop(stop, len(mine) * size / len(positions), start, part))
                # A global batch may have fewer rows than ranks, but loaders have no empty batches.
                yield SeededRows(
                    mine or [order[start]], f"{plan.seed} {epoch.number} {start} {part}"
                )

    def length_from(self, start: int, *, skipped: Sequence[range] = ()) -> int:
        plan = self.cursor.position.plan
        return plan.num_batches(
            start, self._batch_rows, self._cut, least=self._size, skipped=skipped
        )


class SeededRows(list[Any]):
    """A batch's items, and the seed of random numbers that are drawn while they are read."""

    def __init__(self, items: Iterable[Any] = (), seed: str = "") -> None:
        super().__init__(items)
        self.seed = seed


class SeededItems:
    """A data set that seeds this process's generators for each batch that it reads.

    So augmentation doesn't depend on the batches that a loader's process has read before. Other
    attributes are the data set's, also those that a `worker_init_fn` sets.
    """

    _items: Any

    def __init__(self, items: Any) -> None:
        vars(self)["_items"] = items

    def __getattr__(self, name: str) -> Any:
        if name == "_items":  # a copy doesn't have it yet
            raise AttributeError(name)
        return getattr(self._items, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._items, name, value)

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, item: Any) -> Any:
        return self._items[item]

    def __getitems__(self, rows: SeededRows) -> Any:
        seed_place(rows.seed)
        at_once = getattr(self._items, "__getitems__", None)
        return [self._items[row] for row in rows] if at_once is None else at_once([*rows])


def division() -> tuple[int, range]:
    """Return into how many parts a global batch is divided, and which are this rank's."""
    virtual = current()
    if virtual is not None:
        return virtual.count, virtual.own
    return dist.get_world_size(), range(dist.get_rank(), dist.get_rank() + 1)


class PlannedItems(EpochSampler):
    """Yields the indices of this rank's items, for a loader without batches."""

    def __init__(self, cursor: Cursor[DataPosition]) -> None:
        super().__init__(cursor)
        self._batches = PlannedBatches(cursor, batch_size=1, cut="keep")

    def begin(self, epoch: Epoch) -> None:
        super().begin(epoch)
        self._batches.begin(epoch)
        self.stops = self._batches.stops

    def __iter__(self) -> Iterator[int]:
        for batch in self._batches:
            yield from batch

    def length_from(self, start: int, *, skipped: Sequence[range] = ()) -> int:
        return self._batches.length_from(start, skipped=skipped)


class DrawnItems(EpochSampler):
    """Draws items from a custom sampler, with the same random numbers after a restart."""

    def __init__(self, sampler: Any, cursor: Cursor[DataPosition], *, items_per_stop: int) -> None:
        super().__init__(cursor)
        self.sampler = sampler
        self._items_per_stop = items_per_stop

    def _drawn(self, epoch: Epoch, *, per_round: int) -> Iterator[_Drawn]:
        """Yield the items from the epoch's start on, in pieces: a sampler may be endless.

        Each piece except the last has a multiple of `per_round` items.
        """
        at_once = _PIECE
        if has_length(self.sampler):
            # More than its length, so that there is one piece.
            at_once = max(_PIECE, len(self.sampler) + 1)
        size = per_round * -(-at_once // per_round)
        skipped = epoch.start
        passes = passes_of(self.sampler)
        if passes is not None and (repeated := passes.to_repeat(epoch.number)):
            self._draw_again(repeated, size)
        stream = self._seeded(epoch.number)
        if passes is not None:
            passes.begin(self.sampler)
        with stream.used():
            items = iter(self.sampler)
            first = list(islice(items, division()[0]))
        items = chain(first, items)
        is_last = False
        while not is_last:
            with stream.used():
                piece = list(islice(items, skipped, skipped + size))
            skipped, is_last = 0, len(piece) < size
            if passes is not None:
                passes.end(self.sampler, epoch.number)
            yield _Drawn(piece, first, is_last)

    def _draw_again(self, epochs: range, size: int) -> None:
        """Draw earlier epochs again: they change the sampler, and a restart begins with a new one.

        Args:
            epochs: the epochs before the one that is about to be drawn.
            size: more items than an epoch has.
        """
        logger.info(
            "Draws %d earlier epochs again from %s, which changes in each of them.",
            *(len(epochs), type(self.sampler).__qualname__),
        )
        set_epochs = set_epochs_in(self.sampler)
        # A sampler may set its next epoch itself.
        asked = [each.asked for each in set_epochs]

        def ask(epoch: int) -> None:
            for each, last in zip(set_epochs, asked, strict=True):
                each.asked = None
                if last is not None:
                    each(last - epochs.stop + epoch)

        for epoch in epochs:
            ask(epoch)
            with self._seeded(epoch).used():
                deque(islice(self.sampler, size), maxlen=0)
            heartbeat()
        ask(epochs.stop)

    def _seeded(self, epoch: int) -> RandomStream:
        """Set the sampler's epoch, and return the random numbers that it draws from."""
        seed = seed_of(f"{self.cursor.position.plan.seed} {epoch}", octets=7)
        for set_epoch in set_epochs_in(self.sampler):
            set_epoch.begin(epoch)
        for each in samplers_in(self.sampler):
            for generator in generators_of(each):
                seed_generator(generator, seed)
        return RandomStream(seed)

    def _stopping(
        self, mine: Sequence[Any], start: int, stops: deque[Stop], *, ranks: int = 1
    ) -> Iterator[Any]:
        """Yield this rank's items from a position on, and record the position after each batch.

        Positions count the items of this number of ranks.
        """
        for first in range(0, len(mine), self._items_per_stop):
            some = mine[first : first + self._items_per_stop]
            stops.append(Stop(start + (first + len(some)) * ranks))
            yield from some


class _Drawn(NamedTuple):
    items: list[Any]
    first: list[Any]
    """The first items of the epoch, at most world size many, for padding."""

    is_last: bool


_PIECE = 1 << 14
"""Minimum number of items that are drawn at once."""


class SplitSampler(DrawnItems):
    """Splits a custom sampler: rank 0 draws, and each rank takes every world_size-th item.

    Samplers may be random, and all ranks must agree on the items of an epoch, so only rank 0 draws.
    `UndividedSampler` yields the same items on all ranks, so each rank draws for itself. If the
    items can't be divided evenly, the first ones are repeated, as in `DistributedSampler`, so that
    all ranks get the same number.
    """

    def __iter__(self) -> Iterator[Any]:
        assert self.epoch is not None
        start, stops = self.epoch.start, self.stops
        rank, size = dist.get_rank(), dist.get_world_size()
        drawn = self._drawn(self.epoch, per_round=size * self._items_per_stop)
        is_last = False
        while not is_last:
            items, first, is_last = self._shared(drawn)
            padding = islice(cycle(first), -len(items) % size)
            mine = [*items, *padding][rank::size]
            yield from self._stopping(mine, start, stops, ranks=size)
            start += len(items)

    def _shared(self, drawn: Iterator[_Drawn]) -> _Drawn:
        """Return the next piece, the same one on all ranks."""
        if isinstance(self.sampler, UndividedSampler):
            return next(drawn)
        agree_on_call("the loop over a prepared data loader")
        piece: _Drawn = from_rank_0(next(drawn) if dist.get_rank() == 0 else None)
        return piece

    def length_from(self, start: int, *, skipped: Sequence[range] = ()) -> int:
        left = max(0, length_of(self.sampler) - start)
        return -(-left // dist.get_world_size())


class VirtualBatches(SplitSampler):
    """Divides a custom sampler among virtual workers, as `SplitSampler` does among ranks.

    It yields the micro-batches of this rank's virtual workers, from the last to the first, for each
    global batch.
    """

    def __init__(
        self,
        sampler: Any,
        cursor: Cursor[DataPosition],
        *,
        items_per_stop: int,
        is_batches: bool,
        drop_last: bool,
    ) -> None:
        super().__init__(sampler, cursor, items_per_stop=items_per_stop)
        self._is_batches = is_batches
        self._drop_last = drop_last

    def __iter__(self) -> Iterator[SeededRows]:
        assert self.epoch is not None
        epoch, start, stops = self.epoch, self.epoch.start, self.stops
        count, own = division()
        size = self._items_per_stop
        drawn = self._drawn(epoch, per_round=count * size)
        is_last = False
        while not is_last:
            items, first, is_last = self._shared(drawn)
            for begin in range(0, len(items), count * size):
                some = items[begin : begin + count * size]
                if self._drop_last and len(some) < count * size:
                    return
                padded = [*some, *islice(cycle(first), -len(some) % count)]
                for part in reversed(own):
                    mine = padded[part::count]
                    stops.append(Stop(start + len(some), 1.0, start, part))
                    seed = f"{self.cursor.position.plan.seed} {epoch.number} {start} {part}"
                    yield SeededRows(mine[0] if self._is_batches else mine, seed)
                start += len(some)

    def length_from(self, start: int, *, skipped: Sequence[range] = ()) -> int:
        left = max(0, length_of(self.sampler) - start)
        per_batch = division()[0] * self._items_per_stop
        return left // per_batch if self._drop_last else -(-left // per_batch)


class RankSampler(DrawnItems):
    """Draws from a custom sampler that yields each rank's own items. Positions count these."""

    def __iter__(self) -> Iterator[Any]:
        assert self.epoch is not None
        start, stops = self.epoch.start, self.stops
        for drawn in self._drawn(self.epoch, per_round=self._items_per_stop):
            yield from self._stopping(drawn.items, start, stops)
            start += len(drawn.items)

    def length_from(self, start: int, *, skipped: Sequence[range] = ()) -> int:
        return max(0, length_of(self.sampler) - start)


class UndividedSampler(Sampler[int]):
    """Yields all items that a `DistributedSampler` divides among ranks, in its order.

    `SplitSampler` then divides and pads them as `DistributedSampler` does, but with a position that
    any number of ranks can resume from.
    """

    def __init__(self, sampler: DistributedSampler[Any]) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[int]:
        whole = copy(self.sampler)
        whole.rank, whole.num_replicas = 0, 1
        whole.num_samples = whole.total_size = len(self)
        return iter(whole)

    def __len__(self) -> int:
        rows = len(self.sampler.dataset)
        return rows - rows % division()[0] if self.sampler.drop_last else rows
