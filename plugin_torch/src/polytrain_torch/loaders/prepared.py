"""Data loaders that are split by rank, and resume at a checkpoint's position.

A loader's position is the number of items of an epoch that all ranks together have got. `samplers`
assigns items to ranks.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

from polytrain.extension import Cursor, DataPosition, Epoch, Plan
from polytrain_plugins import MicroBatch, VirtualBatch
from polytrain_torch.loaders.chosen_sampler import ChosenSampler, chosen_sampler, seed_for
from polytrain_torch.loaders.places import open_place
from polytrain_torch.loaders.samplers import (
    Cut,
    EpochSampler,
    PlannedBatches,
    PlannedItems,
    RankSampler,
    SeededItems,
    SplitSampler,
    Stop,
    VirtualBatches,
)
from polytrain_torch.loaders.stream_places import SamplerPlace, StreamPlace, UnsplitPlace
from polytrain_torch.loaders.streams import (
    has_state,
    part_of_stream,
    warn_of_lost_place,
    warn_that_it_is_split,
)
from polytrain_torch.loaders.users_samplers import has_length, let_set_epoch, passes_of
from polytrain_torch.models.shared_tensors import rows_are_divided
from polytrain_torch.moving import moved
from polytrain_torch.private import copied_loader
from polytrain_torch.randomness import generators_within, seed_of
from polytrain_torch.row_weights import weighted_loop
from polytrain_torch.survivors.points import epoch_is_over, has_batch, next_batch
from polytrain_torch.virtual_workers import VirtualWorkers, current, refuse_virtual_workers

logger = logging.getLogger(__name__)


class PreparedDataLoader:
    """A data loader with batches on this worker's device. Other attributes are the user's."""

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        device: torch.device | None,
        split: DataLoader[Any] | None = None,
        sampler: EpochSampler | None = None,
        stream: StreamPlace | None = None,
        virtual: VirtualWorkers | None = None,
        name: str | None = None,
    ) -> None:
        """
        Args:
            loader: the user's loader.
            device: device for tensors; None leaves them where they are.
            split: the same loader with this rank's sampler or data set.
            sampler: yields this rank's items.
            stream: the loader's place, if its data set is iterable and it has one.
            virtual: the virtual workers, if the sampler yields their micro-batches.
            name: the loader's name in checkpoints.
        """
        self._loader = loader
        self._device = device
        self._split = loader if split is None else split
        self._sampler = sampler
        self._stream = stream
        self._virtual = virtual
        self._name = name
        self._epoch: Epoch | None = None
        """The epoch that was begun last."""

        _all.add(self)

        self.non_blocking = True
        """Whether copies from pinned memory run while the device computes."""

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # a copy doesn't have it yet
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        """Number of batches of a whole epoch. A resumed epoch may have fewer left."""
        return len(self._split)

    @property
    def has_place(self) -> bool:
        """Whether checkpoints record the loader's place."""
        return self._sampler is not None or self._stream is not None

    @property
    def is_under_way(self) -> bool:
        """Whether the next iteration resumes in the middle of an epoch."""
        return self._sampler is not None and self._sampler.cursor.next_epoch().start > 0

    def batches_left(self) -> int:
        """Return the number of batches of the next iteration."""
        if self._sampler is None:
            return len(self)
        epoch = self._sampler.cursor.next_epoch()
        left = self._sampler.length_from(epoch.start, skipped=epoch.skipped)
        if self._split.batch_sampler is self._sampler or self._split.batch_size is None:
            return left
        full, rest = divmod(left, self._split.batch_size)
        return full + (rest > 0 and not self._split.drop_last)

    def end_epoch(self) -> None:
        """Count the epoch as done: later checkpoints resume with the next epoch."""
        if self._epoch is not None:
            self._epoch.end()

    def __iter__(self) -> Iterator[Any]:
        place = self._stream or self._sampler
        if place is None:
            yield from map(self._on_device, self._split)
            return
        with place.cursor.epoch() as epoch:
            self._epoch = epoch
            place.begin(epoch)
            next_batch()
            for batch in self._batches(epoch):
                has_batch()
                yield batch
                next_batch()
            epoch_is_over()

    def _batches(self, epoch: Epoch) -> Iterator[Any]:
        """Yield an epoch's batches. Each is counted before its step, whose report includes it."""
        if self._stream is not None:
            self._seed_workers(f"{self._stream.seed} {epoch.number}")
            for batch in self._split:
                epoch.check_alone()
                self._stream.given(epoch)
                yield self._on_device(batch)
            return
        assert self._sampler is not None
        self._check_rows(self._sampler)
        stops, seed = self._sampler.stops, self._sampler.cursor.position.plan.seed
        self._seed_workers(f"{seed} {epoch.number} {dist.get_rank()}")
        with weighted_loop() as loop:
            if self._virtual is not None:
                yield from self._virtual_batches(self._virtual, epoch, stops)
                return
            for stop, batch in self._counted(stops):
                epoch.check_alone()
                epoch.given(stop.position)
                batch = self._on_device(batch)
                loop.given(stop.weight, batch)
                yield batch

    def _check_rows(self, sampler: EpochSampler) -> None:
        """
        Raises:
            RuntimeError: the data set has more or fewer items than the plan of its epochs.
        """
        planned = isinstance(sampler, PlannedBatches | PlannedItems)
        rows = sampler.cursor.position.plan.rows
        if planned and (now := len(self._loader.dataset)) != rows:
            raise RuntimeError(
                f"The data set of a prepared data loader has {now} items, and had {rows} when it "
                "was prepared. Prepare the loader again after each change, for example in the loop "
                "over epochs."
            )

    def _virtual_batches(
        self, virtual: VirtualWorkers, epoch: Epoch, stops: deque[Stop]
    ) -> Iterator[VirtualBatch]:
        if self._name is not None and self._loader.batch_size is not None:
            virtual.cut(self._name, self._loader.batch_size)
        batches = self._counted(stops)
        while some := [*islice(batches, len(virtual.own))]:
            epoch.check_alone()
            first, _ = some[0]
            epoch.given(first.position)
            yield virtual.fetched(
                VirtualBatch(
                    micro_batches=tuple(
                        MicroBatch(
                            virtual_worker=stop.virtual_worker,
                            content=self._on_device(content),
                            weight=stop.weight,
                        )
                        for stop, content in some
                    ),
                    place=f"{self._name} {epoch.number} {first.start}",
                )
            )

    def _counted(self, stops: deque[Stop]) -> Iterator[tuple[Stop, Any]]:
        """Yield the epoch's batches, each after its stop.

        Raises:
            RuntimeError: a user's own class yields other batches than its sampler.
        """
        why = (
            f"{type(self._split).__qualname__} doesn't yield one batch for each of its sampler's, "
            "so a checkpoint couldn't tell where it is. Repeat or leave out batches in the loop "
            "over it, or in the sampler"
        )
        for batch in self._split:
            if not stops:
                raise RuntimeError(why)
            yield stops.popleft(), batch
        # torch's own class leaves out a batch that isn't full.
        if len(stops) > 1:
            raise RuntimeError(why)

    def _seed_workers(self, seed: str) -> None:
        """Seed the loader's generator, which seeds the worker processes of each iteration.

        It doesn't use the training function's generators, so that these give the same random
        numbers if an epoch is resumed in its middle.
        """
        generator = self._split.generator
        assert generator is not None
        generator.manual_seed(seed_of(seed, octets=7))

    def _on_device(self, batch: Any) -> Any:
        if self._device is None:
            return batch
        return moved(batch, self._device, non_blocking=self.non_blocking)


_all: WeakSet[PreparedDataLoader] = WeakSet()
"""The loaders of this process."""


def generators_of_data() -> list[Any]:
    """Return the generators that this process draws from while it reads items.

    A data set with a state has its own in that.
    """
    loaders = [each for each in _all if not each.num_workers and each._stream is None]
    return [
        generator
        for each in loaders
        for source in (each.dataset, each.collate_fn)
        for generator in generators_within(source)
    ]


def sharded(
    loader: DataLoader[Any],
    *,
    device: torch.device | None,
    name: str | None = None,
    keeps_place: bool = True,
    is_split: bool = False,
    taken: Callable[[], int] | None = None,
) -> PreparedDataLoader:
    """Return the loader, limited to this rank's part.

    Args:
        loader: the user's loader.
        device: device for tensors; None leaves them where they are.
        name: its name in checkpoints; by default see `open_place`.
        keeps_place: whether checkpoints record its place.
        is_split: whether it already yields this rank's part. Samplers that know the rank always do.
        taken: see `StreamPlace`.
    """
    let_set_epoch(loader.sampler)
    # Without a name, one rank alone may prepare a loader that isn't split.
    is_shared = not is_split or name is not None
    virtual = None if is_split or not keeps_place else current()
    if isinstance(loader.dataset, IterableDataset):
        if virtual is not None:
            refuse_virtual_workers("A data loader of an IterableDataset")
        return _stream(
            loader,
            device,
            name=name,
            keeps_place=keeps_place,
            is_split=is_split,
            is_shared=is_shared,
            taken=taken,
        )
    chosen = chosen_sampler(loader, is_split=is_split)
    if not chosen.is_split:
        rows_are_divided()
    if virtual is not None:
        chosen.check_virtual(loader, virtual)
    let_set_epoch(chosen.sampler)
    plan = chosen.plan(loader, seed=seed_for(loader, chosen.sampler, is_shared=is_shared))
    if not keeps_place:
        cursor = Cursor(DataPosition(plan=plan))
    else:
        name, cursor = open_place(plan, name=name, is_shared=is_shared)
        if not is_shared:
            UnsplitPlace(name, cursor)
        passes = passes_of(chosen.sampler)
        if passes is not None and not chosen.is_planned:
            SamplerPlace(name, passes)
    sampler = _sampler_for(chosen, cursor, virtual, keeps_place=keeps_place)
    batches: Sampler[Any] | None = sampler
    if not (virtual or chosen.is_batches or isinstance(sampler, PlannedBatches)):
        size = chosen.batch_size
        batches = None if size is None else BatchSampler(sampler, size, chosen.drop_last)
    split = copied_loader(
        loader,
        dataset=loader.dataset if virtual is None else SeededItems(loader.dataset),
        sampler=sampler,
        batch_sampler=batches,
        batch_size=chosen.batch_size,
        drop_last=chosen.drop_last,
        generator=torch.Generator(),
    )
    if chosen.drop_last:
        _check_batches(loader, split, virtual, is_trained=keeps_place)
    if not loader.in_order:
        logger.warning(
            "A data loader with in_order=False gives batches in any order: after a restart, the "
            "batches that its worker processes were loading may come twice, or not at all."
        )
    return PreparedDataLoader(
        loader, device=device, split=split, sampler=sampler, virtual=virtual, name=name
    )


def _sampler_for(
    chosen: ChosenSampler,
    cursor: Cursor[DataPosition],
    virtual: VirtualWorkers | None,
    *,
    keeps_place: bool,
) -> EpochSampler:
    """Return what samples this rank's part; see `sharded` for the arguments."""
    if chosen.is_planned:
        if chosen.batch_size is None:
            return PlannedItems(cursor)
        # Evaluation doesn't weight rows, and needs each row exactly once.
        whole: Cut = "keep" if keeps_place else "share"
        cut: Cut = "drop" if chosen.drop_last else whole
        return PlannedBatches(cursor, batch_size=chosen.batch_size, cut=cut)
    items_per_stop = 1 if chosen.is_batches else chosen.batch_size or 1
    if virtual is not None:
        return VirtualBatches(
            chosen.sampler,
            cursor,
            items_per_stop=items_per_stop,
            is_batches=chosen.is_batches,
            drop_last=chosen.drop_last,
        )
    # One position for each batch.
    kind = RankSampler if chosen.is_split else SplitSampler
    return kind(chosen.sampler, cursor, items_per_stop=items_per_stop)


def _stream(
    loader: DataLoader[Any],
    device: torch.device | None,
    *,
    name: str | None,
    keeps_place: bool,
    is_split: bool,
    is_shared: bool,
    taken: Callable[[], int] | None,
) -> PreparedDataLoader:
    """Return a loader of an iterable data set; see `sharded` and `seed_for` for the arguments."""
    if not is_split:
        warn_that_it_is_split()
        rows_are_divided()
    has_place = keeps_place and (
        has_state(loader) or (has_state(loader.dataset) and loader.num_workers == 0)
    )
    if keeps_place and not has_place:
        warn_of_lost_place(loader)
    seed = seed_for(loader, loader.sampler, is_shared=is_shared)
    cursor: Cursor[DataPosition] | None = None
    if has_place:
        plan = Plan(rows=0, shards=1, seed=seed)
        name, cursor = open_place(plan, name=name, is_shared=is_shared)
        seed = cursor.position.plan.seed
    if is_split:
        seed = seed_of(f"{seed} {dist.get_rank()}", octets=7)
    split = copied_loader(
        loader,
        dataset=part_of_stream(loader.dataset, is_split=is_split, seed=seed),
        # Seed all ranks' worker processes alike: a data set that shuffles must yield the same.
        generator=torch.Generator().manual_seed(seed),
    )
    if cursor is None:
        return PreparedDataLoader(loader, device=device, split=split)
    assert name is not None
    holder = split if has_state(loader) else split.dataset
    place = StreamPlace(name, cursor, holder, seed=seed, taken=taken)
    return PreparedDataLoader(loader, device=device, split=split, stream=place)


def _check_batches(
    loader: DataLoader[Any],
    split: DataLoader[Any],
    virtual: VirtualWorkers | None,
    *,
    is_trained: bool,
) -> None:
    """Refuse a loader that would train nothing because it is split; warn of any other.

    Raises:
        ValueError: all of its batches are dropped.
    """
    if has_length(split) and len(loader) and not len(split):
        what, number = "workers", dist.get_world_size()
        if virtual is not None:
            what, number = "virtual workers", virtual.count
        problem = (
            "drop_last=True drops all rows of a data loader: they don't fill a batch of "
            f"{split.batch_size} for each of {number} {what}. Use drop_last=False, a smaller "
            f"batch_size, or no more {what} than {len(loader)}."
        )
        if is_trained:
            raise ValueError(problem)
        logger.warning(problem)
