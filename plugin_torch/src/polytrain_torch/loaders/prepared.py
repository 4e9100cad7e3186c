"""Data loaders that are split by rank, and resume at a checkpoint's position.

A loader's position is the number of items of an epoch that all ranks together have got. `samplers`
assigns items to ranks.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from polytrain.extension import Cursor, DataPosition, Epoch, Plan, open_cursor
from polytrain_plugins import MicroBatch, VirtualBatch
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
    UndividedSampler,
    VirtualBatches,
    has_length,
    knows_rank,
    let_set_epoch,
    samplers_in,
)
from polytrain_torch.loaders.stream_places import StreamPlace, UnsplitPlace
from polytrain_torch.loaders.streams import (
    has_state,
    part_of_stream,
    warn_of_lost_place,
    warn_that_it_is_split,
)
from polytrain_torch.models.shared_tensors import rows_are_divided
from polytrain_torch.moving import moved
from polytrain_torch.randomness import function_seed, generators_of, seed_in, seed_of
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
        return self._sampler is not None and self._sampler.cursor.next_start > 0

    def batches_left(self) -> int:
        """Return the number of batches of the next iteration."""
        if self._sampler is None:
            return len(self)
        cursor = self._sampler.cursor
        left = self._sampler.length_from(cursor.next_start, skipped=cursor.skipped_next)
        if self._split.batch_sampler is self._sampler or self._split.batch_size is None:
            return left
        full, rest = divmod(left, self._split.batch_size)
        return full + (rest > 0 and not self._split.drop_last)

    def end_epoch(self) -> None:
        """Count the epoch as done: later checkpoints resume with the next epoch."""
        if self._sampler is not None and self._sampler.epoch is not None:
            self._sampler.epoch.end()

    def __iter__(self) -> Iterator[Any]:
        if self._stream is not None:
            yield from self._streamed(self._stream)
            return
        if self._sampler is None:
            yield from map(self._on_device, self._split)
            return
        with self._sampler.cursor.epoch() as epoch, weighted_loop() as loop:
            self._sampler.begin(epoch)
            stops = self._sampler.stops
            seed = self._sampler.cursor.position.plan.seed
            self._seed_workers(f"{seed} {epoch.number} {dist.get_rank()}")
            next_batch()
            if self._virtual is not None:
                for batch in self._virtual_batches(self._virtual, epoch, stops):
                    has_batch()
                    yield batch
                    next_batch()
                epoch_is_over()
                return
            for batch in self._split:
                has_batch()
                epoch.check_alone()
                # Count a batch before its step, so that a report in the step includes it.
                stop = stops.popleft()
                epoch.given(stop.position)
                batch = self._on_device(batch)
                loop.given(stop.weight, batch)
                yield batch
                next_batch()
            epoch_is_over()

    def _virtual_batches(
        self, virtual: VirtualWorkers, epoch: Epoch, stops: deque[Stop]
    ) -> Iterator[VirtualBatch]:
        if self._name is not None and self._loader.batch_size is not None:
            virtual.cut(self._name, self._loader.batch_size)
        batches = iter(self._split)
        while some := [*islice(batches, len(virtual.own))]:
            epoch.check_alone()
            its_stops = [stops.popleft() for _ in some]
            epoch.given(its_stops[0].position)
            yield virtual.fetched(
                VirtualBatch(
                    micro_batches=tuple(
                        MicroBatch(
                            virtual_worker=stop.virtual_worker,
                            content=self._on_device(content),
                            weight=stop.weight,
                        )
                        for stop, content in zip(its_stops, some, strict=True)
                    ),
                    place=f"{self._name} {epoch.number} {its_stops[0].start}",
                )
            )

    def _streamed(self, place: StreamPlace) -> Iterator[Any]:
        with place.cursor.epoch() as epoch:
            place.begin(epoch)
            self._seed_workers(f"{place.seed} {epoch.number}")
            next_batch()
            for batch in self._split:
                has_batch()
                epoch.check_alone()
                place.given(epoch)
                yield self._on_device(batch)
                next_batch()
            epoch_is_over()

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
    chosen = _chosen(loader, is_split=is_split)
    if not chosen.is_split:
        rows_are_divided()
    if virtual is not None:
        _check_virtual(loader, chosen, virtual)
    let_set_epoch(chosen.sampler)
    plan = _plan(loader, chosen, seed=_seed(loader, chosen.sampler, is_shared=is_shared))
    if not keeps_place:
        cursor = Cursor(DataPosition(plan=plan))
    elif name is None:
        name, cursor = open_place(plan, is_split=not is_split)
        if is_split:
            UnsplitPlace(name, cursor)
    else:
        cursor = open_cursor(plan, name=name)
    sampler: EpochSampler
    items_per_stop = 1 if chosen.is_batches else chosen.batch_size or 1
    if chosen.is_planned and chosen.batch_size is None:
        sampler = PlannedItems(cursor)
    elif chosen.is_planned and chosen.batch_size is not None:
        # Evaluation doesn't weight rows, and needs each row exactly once.
        whole: Cut = "keep" if keeps_place else "share"
        cut: Cut = "drop" if chosen.drop_last else whole
        sampler = PlannedBatches(cursor, batch_size=chosen.batch_size, cut=cut)
    elif virtual is not None:
        sampler = VirtualBatches(
            chosen.sampler,
            cursor,
            items_per_stop=items_per_stop,
            is_batches=chosen.is_batches,
            drop_last=chosen.drop_last,
        )
    else:
        # One position for each batch.
        kind = RankSampler if chosen.is_split else SplitSampler
        sampler = kind(chosen.sampler, cursor, items_per_stop=items_per_stop)
    if virtual is not None:
        seeded = {**_kept(loader), "dataset": SeededItems(loader.dataset)}
        split = DataLoader(**seeded, batch_sampler=sampler)
    elif chosen.is_batches or isinstance(sampler, PlannedBatches):
        split = DataLoader(**_kept(loader), batch_sampler=sampler)
    else:
        split = DataLoader(
            **_kept(loader),
            sampler=sampler,
            batch_size=chosen.batch_size,
            drop_last=chosen.drop_last,
        )
    if not loader.in_order:
        logger.warning(
            "A data loader with in_order=False gives batches in any order: after a restart, the "
            "batches that its worker processes were loading may come twice, or not at all."
        )
    return PreparedDataLoader(
        loader, device=device, split=split, sampler=sampler, virtual=virtual, name=name
    )


def _check_virtual(loader: DataLoader[Any], chosen: _Chosen, virtual: VirtualWorkers) -> None:
    """Check that virtual workers can have the same micro-batches at any number of workers.

    Raises:
        ValueError: they can't.
    """
    if loader.batch_sampler is None:
        what, remedy = "it has no batches", "Give it a batch_size"
    elif chosen.is_split:
        what = f"{type(chosen.sampler).__qualname__} yields a rank's items"
        remedy = "Use a sampler that yields all items, which is then divided"
    elif not loader.in_order:
        what, remedy = "in_order=False gives batches in any order", "Leave it out"
    elif loader.num_workers and virtual.is_uneven and not has_length(chosen.sampler):
        # Rank 0 draws and sends a piece whenever the loader's processes need one: that is at other
        # batches on a rank with more virtual workers, and both would wait for each other.
        what = (
            f"{type(chosen.sampler).__qualname__} has no __len__, so its items can't be drawn at "
            "once, and ranks with more virtual workers than others need them earlier"
        )
        remedy = (
            "Define __len__ in the sampler, use num_workers=0 in the loader, or take a number of "
            "workers that divides virtual_workers"
        )
    else:
        return
    raise ValueError(
        f"With ScalingConfig(virtual_workers=…) a data loader is divided into micro-batches: {what}"
        f". {remedy}, or pass add_dist_sampler=False for a loader that isn't trained on."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chosen:
    """The sampler that chooses a loader's items."""

    sampler: Any
    is_batches: bool = False
    """Whether it yields whole batches."""

    is_split: bool = False
    """Whether it yields only this rank's part."""

    is_planned: bool = False
    """Whether it yields the whole data set, so that a plan can replace it."""

    batch_size: int | None = None
    drop_last: bool = False


def _chosen(loader: DataLoader[Any], *, is_split: bool) -> _Chosen:
    sampler, batches = loader.sampler, loader
    is_batches = _has_own_batches(loader)
    if is_batches:
        sampler = batches = loader.batch_sampler
        if type(sampler) is BatchSampler and _divides_for_ranks(sampler.sampler):
            sampler, is_batches = sampler.sampler, False
    if is_batches:
        return _Chosen(sampler=sampler, is_batches=True, is_split=is_split or knows_rank(sampler))
    sizes = {"batch_size": batches.batch_size, "drop_last": batches.drop_last}
    if _divides_for_ranks(sampler):
        return _Chosen(sampler=UndividedSampler(sampler), **sizes)
    is_split = is_split or knows_rank(sampler)
    is_planned = not is_split and _reads_everything(loader)
    return _Chosen(sampler=sampler, is_split=is_split, is_planned=is_planned, **sizes)


def _divides_for_ranks(sampler: Any) -> bool:
    """Whether a sampler is torch's `DistributedSampler` over all ranks."""
    mine = dist.get_rank(), dist.get_world_size()
    return type(sampler) is DistributedSampler and (sampler.rank, sampler.num_replicas) == mine


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
    """Return a loader of an iterable data set; see `sharded` and `_seed` for the arguments."""
    if not is_split:
        warn_that_it_is_split()
        rows_are_divided()
    has_place = keeps_place and (
        has_state(loader) or (has_state(loader.dataset) and loader.num_workers == 0)
    )
    if keeps_place and not has_place:
        warn_of_lost_place(loader)
    seed = _seed(loader, loader.sampler, is_shared=is_shared)
    cursor: Cursor[DataPosition] | None = None
    if has_place:
        plan = Plan(rows=0, shards=1, seed=seed)
        if name is None:
            name, cursor = open_place(plan, is_split=not is_split)
        else:
            cursor = open_cursor(plan, name=name)
        seed = cursor.position.plan.seed
    if is_split:
        seed = seed_of(f"{seed} {dist.get_rank()}", octets=7)
    # A copy keeps the class of a loader with a state.
    split = copy(loader)
    # Loaders refuse to set these attributes.
    vars(split).update(
        dataset=part_of_stream(loader.dataset, is_split=is_split, seed=seed),
        # Seed all ranks' worker processes alike: a data set that shuffles must yield the same.
        generator=torch.Generator().manual_seed(seed),
        _iterator=None,
    )
    if cursor is None:
        return PreparedDataLoader(loader, device=device, split=split)
    assert name is not None
    holder = split if has_state(loader) else split.dataset
    place = StreamPlace(name, cursor, holder, seed=seed, taken=taken)
    return PreparedDataLoader(loader, device=device, split=split, stream=place)


def _kept(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the loader's arguments, except those that choose and order its items."""
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
    """Whether the user has passed a batch sampler, which may be torch's own class."""
    # Any other loader with a batch size has made its own batch sampler.
    return loader.batch_sampler is not None and (
        loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler
    )


def _reads_everything(loader: DataLoader[Any]) -> bool:
    """Whether the loader reads the data set from first to last, or all of it in random order."""
    sampler = loader.sampler
    # A sampler with a different source or size is a custom one.
    in_order = type(sampler) is SequentialSampler
    return (in_order or _shuffles(sampler)) and sampler.data_source is loader.dataset


def _shuffles(sampler: Any) -> bool:
    return (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and sampler.num_samples == len(sampler.data_source)
    )


def _plan(loader: DataLoader[Any], chosen: _Chosen, *, seed: int) -> Plan:
    """Return the order of the loader's epochs. For custom samplers only its seed is used."""
    # Every rank can read every item of a map-style data set.
    plan = Plan(rows=0, shards=1, seed=seed)
    if chosen.is_planned:
        shuffles = _shuffles(loader.sampler)
        return replace(plan, rows=len(loader.dataset), shuffle=shuffles)
    if chosen.is_split:
        # With another number of ranks the items differ: no resuming in the middle of an epoch.
        rows = len(chosen.sampler) if hasattr(chosen.sampler, "__len__") else 0
        return replace(plan, rows=rows, window=dist.get_world_size())
    return plan


def _seed(loader: DataLoader[Any], sampler: Any, *, is_shared: bool) -> int:
    """Return a seed from the loader's generator, else its sampler's, else torch's.

    Args:
        loader: the user's loader.
        sampler: the sampler that chooses its items.
        is_shared: whether all ranks call this, and get rank 0's seed. Otherwise ranks that were
            seeded alike, or not at all, get the same.
    """
    if loader.generator is not None:
        own = loader.generator.initial_seed()
    else:
        generators = [each for one in samplers_in(sampler) for each in generators_of(one)]
        own = seed_in(generators) or function_seed()
    if not is_shared:
        return own % (1 << 31)
    seed = torch.tensor([own % (1 << 31)])
    if dist.get_world_size() > 1:
        seed = seed.cuda() if dist.get_backend() == "nccl" else seed
        dist.broadcast(seed, src=0)
    return int(seed.item())
