"""Data loaders that are split by rank, go on where a checkpoint was made, and stay what they were.

A loader that reads its whole data set in order, or shuffled, is read by the core's plan: the same
global batches on any number of workers. A user's own sampler is drawn by rank 0 and dealt out; its
position is the number of items drawn.
"""

from __future__ import annotations

import contextlib
import logging
from abc import abstractmethod
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from polytrain.extension import Cursor, DataPosition, Epoch, Plan, open_cursor
from polytrain_torch.moving import moved
from polytrain_torch.randomness import seed_of
from polytrain_torch.streams import RanksPart, tell_once

logger = logging.getLogger(__name__)


class EpochSampler(Sampler[Any]):
    """Gives this rank's items of an epoch, and notes where in the epoch each of them ends.

    A data loader asks for items long before it gives them: what has been given is up to whoever
    takes the batches out of it.
    """

    def __init__(self, cursor: Cursor[DataPosition]) -> None:
        self.cursor = cursor
        self.epoch: Epoch | None = None
        self.stops: deque[int] = deque()

    def begin(self, epoch: Epoch) -> None:
        """The next iteration is over this epoch."""
        self.epoch = epoch
        self.stops.clear()

    @abstractmethod
    def length_from(self, start: int) -> int:
        """How many it gives this rank, of an epoch that begins there."""

    def __len__(self) -> int:
        return self.length_from(0)


class PlannedBatches(EpochSampler):
    """The indices of this rank's batches, by the plan that shards are read by too."""

    def __init__(self, cursor: Cursor[DataPosition], *, batch_size: int, drop_last: bool) -> None:
        super().__init__(cursor)
        self._batch_rows = batch_size * dist.get_world_size()
        self._drop_last = drop_last

    def __iter__(self) -> Iterator[list[int]]:
        assert self.epoch is not None
        plan = self.cursor.position.plan
        order = plan.epoch(self.epoch.number)
        rank, size = dist.get_rank(), dist.get_world_size()
        for positions in plan.global_batches(self.epoch.start, self._batch_rows, self._remainder):
            self.stops.append(positions.stop)
            mine = [
                int(row)
                for shard, indices in plan.batch_share(positions.start, positions.stop, size, rank)
                for picked in order.of_shard(shard).pick(indices)
                for row in picked.rows
            ]
            # A batch of fewer rows than ranks: data loaders know no empty batch.
            yield mine or [order[positions.start]]

    def length_from(self, start: int) -> int:
        plan = self.cursor.position.plan
        return plan.num_batches(start, self._batch_rows, self._remainder)

    @property
    def _remainder(self) -> Any:
        return "drop" if self._drop_last else "keep"


class PlannedItems(EpochSampler):
    """The same, one by one, for a loader that doesn't batch."""

    def __init__(self, cursor: Cursor[DataPosition]) -> None:
        super().__init__(cursor)
        self._batches = PlannedBatches(cursor, batch_size=1, drop_last=False)
        self.stops = self._batches.stops

    def begin(self, epoch: Epoch) -> None:
        super().begin(epoch)
        self._batches.begin(epoch)

    def __iter__(self) -> Iterator[int]:
        for batch in self._batches:
            yield from batch

    def length_from(self, start: int) -> int:
        return self._batches.length_from(start)


class SplitSampler(EpochSampler):
    """A user's own sampler, dealt out: rank 0 draws, everybody takes every world_size-th.

    Rank 0's draw counts because samplers may be random, and the ranks must not disagree about
    what an epoch consists of. It is drawn with torch's random numbers seeded for the epoch, so that
    it is the same one after a restart. A draw that doesn't divide evenly begins again at its start,
    as in `DistributedSampler`, so that all ranks get equally many.
    """

    def __init__(self, sampler: Any, cursor: Cursor[DataPosition], *, items_per_stop: int) -> None:
        super().__init__(cursor)
        self.sampler = sampler
        self._items_per_stop = items_per_stop

    def __iter__(self) -> Iterator[Any]:
        assert self.epoch is not None
        rank, size = dist.get_rank(), dist.get_world_size()
        drawn: list[Any] = [self._draw(self.epoch.number) if rank == 0 else None]
        if size > 1:
            dist.broadcast_object_list(drawn, src=0)
        start = self.epoch.start
        items = drawn[0][start:]
        padding = -len(items) % size
        mine = [*items, *(items * size)[:padding]][rank::size]
        for first in range(0, len(mine), self._items_per_stop):
            some = mine[first : first + self._items_per_stop]
            self.stops.append(start + (first + len(some)) * size)
            yield from some

    def length_from(self, start: int) -> int:
        left = max(0, len(self.sampler) - start)
        return -(-left // dist.get_world_size())

    def _draw(self, epoch: int) -> list[Any]:
        seed = seed_of(f"{self.cursor.position.plan.seed} {epoch}", octets=7)
        inner = getattr(self.sampler, "sampler", None)
        for generator in (getattr(of, "generator", None) for of in (self.sampler, inner)):
            if generator is not None:
                generator.manual_seed(seed)
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            return list(self.sampler)


class PreparedDataLoader:
    """A data loader whose batches are on this worker's device. Everything else is the loader's."""

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        device: torch.device | None,
        split: DataLoader[Any] | None = None,
        sampler: EpochSampler | None = None,
    ) -> None:
        """
        Args:
            loader: the user's.
            device: where tensors go; None leaves them where they are.
            split: the same, with the sampler.
            sampler: gives this rank's part.
        """
        self._loader = loader
        self._device = device
        self._split = loader if split is None else split
        self._sampler = sampler

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # while a copy is being made there is none yet
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        """Batches of a whole epoch: of the one that a restart goes on with, fewer may be left."""
        return len(self._split)

    @property
    def has_place(self) -> bool:
        """Whether it goes on where a checkpoint was."""
        return self._sampler is not None

    @property
    def is_under_way(self) -> bool:
        """Whether the next iteration begins in the middle of an epoch, where a checkpoint was."""
        return self._sampler is not None and self._sampler.cursor.next_start > 0

    def batches_left(self) -> int:
        """Of the next iteration."""
        if self._sampler is None:
            return len(self)
        left = self._sampler.length_from(self._sampler.cursor.next_start)
        if self._split.batch_sampler is self._sampler or self._split.batch_size is None:
            return left
        full, rest = divmod(left, self._split.batch_size)
        return full + (rest > 0 and not self._split.drop_last)

    def end_epoch(self) -> None:
        """The last batch has been given: checkpoints go on with the next epoch."""
        if self._sampler is not None and self._sampler.epoch is not None:
            self._sampler.epoch.end()

    def __iter__(self) -> Iterator[Any]:
        if self._sampler is None:
            yield from map(self._on_device, self._split)
            return
        with self._sampler.cursor.epoch() as epoch:
            self._sampler.begin(epoch)
            self._seed_workers(epoch.number)
            for batch in self._split:
                # Given is given: whoever reports while handling a batch has used it.
                epoch.given(self._sampler.stops.popleft())
                yield self._on_device(batch)

    def _seed_workers(self, epoch: int) -> None:
        """A loader draws a seed for its workers whenever it is iterated over.

        From a generator of its own: the training function's stay as they are, so that it goes
        on with the same numbers when an epoch is begun once more in its middle.
        """
        assert self._sampler is not None
        seed = f"{self._sampler.cursor.position.plan.seed} {epoch} {dist.get_rank()}"
        generator = self._split.generator
        assert generator is not None
        generator.manual_seed(seed_of(seed, octets=7))

    def _on_device(self, batch: Any) -> Any:
        return batch if self._device is None else moved(batch, self._device)


def sharded(
    loader: DataLoader[Any],
    *,
    device: torch.device | None,
    name: str | None = None,
    keeps_place: bool = True,
) -> PreparedDataLoader:
    """The same loader, giving this rank its part only.

    Args:
        loader: the user's.
        device: where tensors go; None leaves them where they are.
        name: of its place in checkpoints; by default, the loader's number.
        keeps_place: whether checkpoints record its place.
    """
    if isinstance(loader.sampler, DistributedSampler):
        return PreparedDataLoader(loader, device=device)
    _let_set_epoch(loader.sampler)
    if isinstance(loader.dataset, IterableDataset):
        return _split_stream(loader, device)
    arguments = _kept(loader)
    plan = _plan(loader)
    cursor = open_cursor(plan, name=name) if keeps_place else Cursor(DataPosition(plan=plan))
    sampler: EpochSampler
    if _has_own_batches(loader):
        sampler = SplitSampler(loader.batch_sampler, cursor, items_per_stop=1)
        split = DataLoader(**arguments, batch_sampler=sampler)
    elif not _reads_everything(loader):
        # One stop for each batch.
        sampler = SplitSampler(loader.sampler, cursor, items_per_stop=loader.batch_size or 1)
        split = DataLoader(
            **arguments,
            sampler=sampler,
            batch_size=loader.batch_size,
            drop_last=loader.drop_last,
        )
    elif loader.batch_size is None:
        sampler = PlannedItems(cursor)
        split = DataLoader(**arguments, sampler=sampler, batch_size=None)
    else:
        sampler = PlannedBatches(cursor, batch_size=loader.batch_size, drop_last=loader.drop_last)
        split = DataLoader(**arguments, batch_sampler=sampler)
    if not loader.in_order:
        logger.warning(
            "A data loader with in_order=False gives batches as they come: after a restart, as "
            "many as its worker processes have under way may come twice, or not at all."
        )
    return PreparedDataLoader(loader, device=device, split=split, sampler=sampler)


def _let_set_epoch(sampler: Any) -> None:
    """Let scripts call `set_epoch` as they would for a `DistributedSampler`.

    It has no effect: each iteration is an epoch. A sampler that has one of its own keeps it.
    """
    if not hasattr(sampler, "set_epoch"):
        with contextlib.suppress(AttributeError):  # a list, or a class with slots
            sampler.set_epoch = _ignore_epoch


def _ignore_epoch(epoch: int) -> None:
    pass


def _split_stream(loader: DataLoader[Any], device: torch.device | None) -> PreparedDataLoader:
    tell_once()
    split: DataLoader[Any] = DataLoader(
        **{**_kept(loader), "dataset": RanksPart(loader.dataset)},  # type: ignore[arg-type]
        batch_size=loader.batch_size,
        drop_last=loader.drop_last,
    )
    return PreparedDataLoader(loader, device=device, split=split)


def _kept(loader: DataLoader[Any]) -> dict[str, Any]:
    """What a loader was made with, besides what says which items come when."""
    return {
        "dataset": loader.dataset,
        "num_workers": loader.num_workers,
        "collate_fn": loader.collate_fn,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "generator": torch.Generator(),
        "prefetch_factor": loader.prefetch_factor,
        "persistent_workers": loader.persistent_workers,
        "pin_memory_device": loader.pin_memory_device,
        "in_order": loader.in_order,
    }


def _has_own_batches(loader: DataLoader[Any]) -> bool:
    """Whether the user has given it a batch sampler, of torch's own class too."""
    # It has one of its own making for every other loader with a batch size.
    return loader.batch_sampler is not None and (
        loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler
    )


def _reads_everything(loader: DataLoader[Any]) -> bool:
    """Whether the loader reads the data set from first to last, or all of it in random order."""
    sampler = loader.sampler
    # Over another source than the data set, or with a size of its own, it is the user's choice.
    in_order = type(sampler) is SequentialSampler
    return (in_order or _shuffles(sampler)) and sampler.data_source is loader.dataset


def _shuffles(sampler: Any) -> bool:
    return (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and sampler.num_samples == len(sampler.data_source)
    )


def _plan(loader: DataLoader[Any]) -> Plan:
    """The order of the loader's epochs; of a user's own sampler, only what its position is of."""
    planned = _reads_everything(loader) and not _has_own_batches(loader)
    return Plan(
        rows=len(loader.dataset) if planned else 0,  # type: ignore[arg-type]  # it is map-style
        # A map-style data set gives any item to anybody.
        shards=1,
        shuffle=planned and _shuffles(loader.sampler),
        seed=_seed(loader),
    )


def _seed(loader: DataLoader[Any]) -> int:
    """A seed that all ranks share: rank 0's, from the loader's generator or else torch's own."""
    own = loader.generator.initial_seed() if loader.generator is not None else torch.initial_seed()
    seed = torch.tensor([own % (1 << 31)])
    if dist.get_world_size() > 1:
        seed = seed.cuda() if dist.get_backend() == "nccl" else seed
        dist.broadcast(seed, src=0)
    return int(seed.item())
