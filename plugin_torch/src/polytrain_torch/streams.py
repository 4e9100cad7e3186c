"""Iterable data sets, split by rank."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any

import torch.distributed as dist
from torch.utils.data import IterableDataset

logger = logging.getLogger(__name__)

_reported = False


class RanksPart(IterableDataset[Any]):
    """One item of every round of as many as there are ranks: this rank's.

    All ranks get equally many. If the items don't fill the last round, it is filled with the first
    ones, as `DistributedSampler` does. With worker processes, each of them deals out what it reads.

    Args:
        dataset: the same on every rank, in the same order.
    """

    def __init__(self, dataset: IterableDataset[Any]) -> None:
        self._dataset = dataset
        # Where it is iterated over, in a worker process, nobody knows.
        self._rank, self._size = dist.get_rank(), dist.get_world_size()

    def __iter__(self) -> Iterator[Any]:
        items = iter(self._dataset)
        first = round_ = list(islice(items, self._size))
        while len(round_) == self._size:
            yield round_[self._rank]
            round_ = list(islice(items, self._size))
        if round_:
            repeated = cycle(first)
            yield [*round_, *islice(repeated, self._size - len(round_))][self._rank]

    def __len__(self) -> int:
        # Of one without a length, this raises what is usual.
        return -(-len(self._dataset) // self._size)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == "_dataset":  # while a copy is being made there is none yet
            raise AttributeError(name)
        return getattr(self._dataset, name)


def tell_once() -> None:
    """Say what is done to iterable data sets: one that looks at the rank itself would be halved."""
    global _reported
    if not _reported and dist.get_rank() == 0 and dist.get_world_size() > 1:
        logger.warning(
            "An iterable data set is split by rank: of every %d items, each rank gets one. If it "
            "is split already, say prepare_data_loader(…, add_dist_sampler=False).",
            dist.get_world_size(),
        )
    _reported = True
