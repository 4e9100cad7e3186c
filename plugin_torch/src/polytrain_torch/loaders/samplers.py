"""Samplers that give a rank its items of an epoch, and know where in the epoch they are.

A loader that reads its whole data set in order, or shuffled, uses the core's plan: the same global
batches on any number of workers. Custom samplers are drawn.
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from itertools import chain, cycle, islice
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler, Sampler

from polytrain.extension import Cursor, DataPosition, Epoch
from polytrain_torch.collectives.call_agreement import agree_on_call
from polytrain_torch.randomness import RandomStream, generators_of, seed_generator, seed_of

Cut = Literal["keep", "share", "drop"]
"""How an epoch is cut into global batches; see the core's."""


class Stop(NamedTuple):
    """What a batch means for its epoch, and for the average of the ranks' gradients."""

    position: int
    """Where the epoch stands once the batch has been given."""

    weight: float = 1.0
    """See `Shard.gradient_weight`."""


class EpochSampler(Sampler[Any]):
    """Gives this rank's items of an epoch, and records where in the epoch each of them ends.

    A data loader requests items long before it returns them, so the code that takes batches from
    the loader counts them.
    """

    def __init__(self, cursor: Cursor[DataPosition]) -> None:
        self.cursor = cursor
        self.epoch: Epoch | None = None
        self.stops: deque[Stop] = deque()

    def begin(self, epoch: Epoch) -> None:
        """The next iteration is over this epoch."""
        self.epoch = epoch
        # An earlier iteration that isn't over keeps its own.
        self.stops = deque()

    @abstractmethod
    def length_from(self, start: int) -> int:
        """Number of this rank's items in an epoch that begins at `start`."""

    def __len__(self) -> int:
        return self.length_from(0)


class PlannedBatches(EpochSampler):
    """The indices of this rank's batches, by the plan that shards use too."""

    def __init__(
        self,
        cursor: Cursor[DataPosition],
        *,
        batch_size: int,
        cut: Cut,
    ) -> None:
        super().__init__(cursor)
        self._batch_rows = batch_size * dist.get_world_size()
        self._cut = cut

    def __iter__(self) -> Iterator[list[int]]:
        assert self.epoch is not None
        epoch, stops = self.epoch, self.stops
        plan = self.cursor.position.plan
        order = plan.epoch(epoch.number)
        rank, size = dist.get_rank(), dist.get_world_size()
        # A loop that trains nothing weighs no rows, and wants each of them once.
        is_whole = self._cut == "keep" and not torch.is_grad_enabled()
        cut: Cut = "share" if is_whole else self._cut
        for positions in plan.global_batches(epoch.start, self._batch_rows, cut, least=size):
            mine = [
                int(row)
                for shard, indices in plan.batch_share(positions.start, positions.stop, size, rank)
                for selection in order.of_shard(shard).select(indices)
                for row in selection.rows
            ]
            stops.append(Stop(positions.stop, len(mine) * size / len(positions)))
            # The batch has fewer rows than ranks, and data loaders have no empty batches.
            yield mine or [order[positions.start]]

    def length_from(self, start: int) -> int:
        plan = self.cursor.position.plan
        return plan.num_batches(start, self._batch_rows, self._cut)


class PlannedItems(EpochSampler):
    """The indices of this rank's items, for a loader without batches."""

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

    def length_from(self, start: int) -> int:
        return self._batches.length_from(start)


class DrawnItems(EpochSampler):
    """The items of a custom sampler, drawn with the same random numbers after a restart."""

    def __init__(self, sampler: Any, cursor: Cursor[DataPosition], *, items_per_stop: int) -> None:
        super().__init__(cursor)
        self.sampler = sampler
        self._items_per_stop = items_per_stop

    def _drawn(self, epoch: Epoch, *, per_round: int) -> Iterator[_Drawn]:
        """The items from the epoch's start on, in pieces: a sampler may be endless.

        Args:
            epoch: which epoch.
            per_round: each piece has a multiple of this number of items, except the last.
        """
        seed = seed_of(f"{self.cursor.position.plan.seed} {epoch.number}", octets=7)
        for each in samplers_in(self.sampler):
            if isinstance(set_epoch := getattr(each, "set_epoch", None), SetEpoch):
                set_epoch.begin(epoch.number)
            for generator in generators_of(each):
                seed_generator(generator, seed)
        at_once = _PIECE
        with contextlib.suppress(TypeError):  # it has no length
            # Beyond its end, so that there is one piece.
            at_once = max(_PIECE, len(self.sampler) + 1)
        size = per_round * -(-at_once // per_round)
        stream, skipped = RandomStream(seed), epoch.start
        with stream.used():
            items = iter(self.sampler)
            first = list(islice(items, dist.get_world_size()))
        items = chain(first, items)
        is_last = False
        while not is_last:
            with stream.used():
                piece = list(islice(items, skipped, skipped + size))
            skipped, is_last = 0, len(piece) < size
            yield _Drawn(piece, first, is_last)

    def _stopping(
        self, mine: Sequence[Any], start: int, stops: deque[Stop], *, ranks: int = 1
    ) -> Iterator[Any]:
        """Give items, and record where each batch of them stops.

        Args:
            mine: the items.
            start: position of the first one.
            stops: where to record it.
            ranks: number of ranks whose items positions count.
        """
        for first in range(0, len(mine), self._items_per_stop):
            some = mine[first : first + self._items_per_stop]
            stops.append(Stop(start + (first + len(some)) * ranks))
            yield from some


class _Drawn(NamedTuple):
    items: list[Any]
    first: list[Any]
    """The first items of the epoch, at most one for each rank."""

    is_last: bool


_PIECE = 1 << 14
"""Number of items that are drawn at once, at least."""


class SplitSampler(DrawnItems):
    """A custom sampler: rank 0 draws, and each rank takes every world_size-th item.

    Samplers may be random, and all ranks must agree on the items of an epoch, so only rank 0 draws.
    `UndividedSampler` gives all ranks the same, so that each draws for itself.
    If the items don't divide evenly, the first ones are repeated, as in `DistributedSampler`, so
    that all ranks get the same number.
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
        """The next piece, which is the same on all ranks."""
        if isinstance(self.sampler, UndividedSampler):
            return next(drawn)
        agree_on_call("the loop over a prepared data loader")
        sent: list[Any] = [next(drawn) if dist.get_rank() == 0 else None]
        if dist.get_world_size() > 1:
            dist.broadcast_object_list(sent, src=0)
        piece: _Drawn = sent[0]
        return piece

    def length_from(self, start: int) -> int:
        left = max(0, _length(self.sampler) - start)
        return -(-left // dist.get_world_size())


class RankSampler(DrawnItems):
    """A custom sampler that gives each rank its own items. Positions count these."""

    def __iter__(self) -> Iterator[Any]:
        assert self.epoch is not None
        start, stops = self.epoch.start, self.stops
        for drawn in self._drawn(self.epoch, per_round=self._items_per_stop):
            yield from self._stopping(drawn.items, start, stops)
            start += len(drawn.items)

    def length_from(self, start: int) -> int:
        return max(0, _length(self.sampler) - start)


class UndividedSampler(Sampler[int]):
    """What a `DistributedSampler` divides among the ranks, in its order.

    Divided by `SplitSampler`, which repeats the same items, it is the same on every rank, and has a
    place that any number of ranks can resume from.
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
        return rows - rows % dist.get_world_size() if self.sampler.drop_last else rows


class SetEpoch:
    """A sampler's `set_epoch`: called for each epoch, unless the training function calls it."""

    def __init__(self, own: Callable[[int], Any]) -> None:
        self._own = own
        self._is_called = False

    def __call__(self, epoch: int) -> None:
        self._is_called = True
        self._own(epoch)

    def begin(self, epoch: int) -> None:
        """The sampler is drawn for this epoch."""
        if not self._is_called:
            self._own(epoch)


def let_set_epoch(sampler: Any) -> None:
    """Let scripts call `set_epoch` as for a `DistributedSampler`, or leave it out."""
    for each in samplers_in(sampler):
        own = getattr(each, "set_epoch", _ignore_epoch)
        if not isinstance(own, SetEpoch):
            with contextlib.suppress(AttributeError):  # a list, or a class with slots
                each.set_epoch = SetEpoch(own)


def samplers_in(sampler: Any) -> list[Any]:
    """A sampler, and those that it draws from."""
    found: list[Any] = []
    while sampler is not None and not any(sampler is each for each in found):
        found.append(sampler)
        sampler = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)
    return found


def knows_rank(sampler: Any) -> bool:
    """Whether a sampler gives each rank its own items, as `DistributedSampler` does."""
    return any(hasattr(each, name) for each in samplers_in(sampler) for name in _RANK_NAMES)


_RANK_NAMES = ("num_replicas", "rank", "process_index")
"""Attributes of the samplers of torch and of libraries on top of it that know their rank."""


def _length(sampler: Any) -> int:
    try:
        return len(sampler)
    except TypeError as error:
        raise TypeError(
            f"{type(sampler).__qualname__} has no __len__, so the number of batches of an epoch "
            "isn't known. Define __len__ in the sampler, or don't ask for the loader's length "
            "(Lightning needs it)."
        ) from error


def _ignore_epoch(epoch: int) -> None:
    pass
