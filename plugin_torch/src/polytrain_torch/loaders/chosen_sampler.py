"""Which sampler chooses a loader's items, and which order this gives to its epochs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
)

from polytrain.extension import Plan
from polytrain_torch.collectives.gathering import from_rank_0
from polytrain_torch.loaders.samplers import UndividedSampler
from polytrain_torch.loaders.users_samplers import has_length, knows_rank, samplers_in
from polytrain_torch.randomness import function_seed, generators_of, seed_in
from polytrain_torch.virtual_workers import VirtualWorkers


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenSampler:
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

    def check_virtual(self, loader: DataLoader[Any], virtual: VirtualWorkers) -> None:
        """Check that virtual workers can have the same micro-batches at any number of workers.

        Raises:
            ValueError: they can't.
        """
        if loader.batch_sampler is None:
            what, remedy = "it has no batches", "Give it a batch_size"
        elif self.is_split:
            what = f"{type(self.sampler).__qualname__} yields a rank's items"
            remedy = "Use a sampler that yields all items, which is then divided"
        elif not loader.in_order:
            what, remedy = "in_order=False gives batches in any order", "Leave it out"
        elif loader.num_workers and virtual.is_uneven and not has_length(self.sampler):
            # Rank 0 draws and sends a piece whenever the loader's processes need one: that is at
            # other batches on a rank with more virtual workers, and both would wait for each other.
            what = (
                f"{type(self.sampler).__qualname__} has no __len__, so its items can't be drawn at "
                "once, and ranks with more virtual workers than others need them earlier"
            )
            remedy = (
                "Define __len__ in the sampler, use num_workers=0 in the loader, or take a number "
                "of workers that divides virtual_workers"
            )
        else:
            return
        raise ValueError(
            "With ScalingConfig(virtual_workers=…) a data loader is divided into micro-batches: "
            f"{what}. {remedy}, or pass add_dist_sampler=False for a loader that isn't trained on."
        )

    def plan(self, loader: DataLoader[Any], *, seed: int) -> Plan:
        """Return the order of the loader's epochs. For custom samplers only its seed is used."""
        # Every rank can read every item of a map-style data set.
        plan = Plan(rows=0, shards=1, seed=seed)
        if self.is_planned:
            shuffles = _shuffles(loader.sampler)
            return replace(plan, rows=len(loader.dataset), shuffle=shuffles)
        if self.is_split:
            # With another number of ranks the items differ: no resuming in the middle of an epoch.
            rows = len(self.sampler) if hasattr(self.sampler, "__len__") else 0
            return replace(plan, rows=rows, window=dist.get_world_size())
        return plan


def chosen_sampler(loader: DataLoader[Any], *, is_split: bool) -> ChosenSampler:
    """Return the sampler that chooses a loader's items, of this rank alone if it `is_split`."""
    sampler, batches = loader.sampler, loader
    is_batches = _has_own_batches(loader)
    if is_batches:
        sampler = batches = loader.batch_sampler
        if type(sampler) is BatchSampler and _divides_for_ranks(sampler.sampler):
            sampler, is_batches = sampler.sampler, False
    if is_batches:
        return ChosenSampler(
            sampler=sampler, is_batches=True, is_split=is_split or knows_rank(sampler)
        )
    sizes = {"batch_size": batches.batch_size, "drop_last": batches.drop_last}
    if _divides_for_ranks(sampler):
        return ChosenSampler(sampler=UndividedSampler(sampler), **sizes)
    is_split = is_split or knows_rank(sampler)
    is_planned = not is_split and _reads_everything(loader)
    return ChosenSampler(sampler=sampler, is_split=is_split, is_planned=is_planned, **sizes)


def _divides_for_ranks(sampler: Any) -> bool:
    """Whether a sampler is torch's `DistributedSampler` over all ranks."""
    mine = dist.get_rank(), dist.get_world_size()
    return type(sampler) is DistributedSampler and (sampler.rank, sampler.num_replicas) == mine


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


def seed_for(loader: DataLoader[Any], sampler: Any, *, is_shared: bool) -> int:
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
    return int(from_rank_0(own) if is_shared else own) % (1 << 31)
