"""Splits iterable data sets by rank."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from itertools import cycle, islice
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, get_worker_info
from torch.utils.data.graph_settings import apply_random_seed, apply_sharding

from polytrain_plugins.type_names import a_type

logger = logging.getLogger(__name__)

_warned: set[str] = set()


class RanksPart(IterableDataset[Any]):
    """Yields this rank's items: one of every `size` items, which are a round.

    All ranks get the same number. If the items don't fill the last round, the first items are
    repeated, as by `DistributedSampler`. Each worker process of a loader splits the items it reads.
    """

    def __init__(self, dataset: IterableDataset[Any], *, rank: int, size: int) -> None:
        """
        Args:
            dataset: yields the same items in the same order on every rank.
            rank: this rank, which a loader's worker process doesn't know.
            size: number of ranks.
        """
        self._dataset = dataset
        self._rank, self._size = rank, size
        self._is_over = False
        """Whether the data set has no items left for the iteration that began last."""

    def __iter__(self) -> Iterator[Any]:
        items = self._items()
        first = list(islice(items, self._size))
        yield from self._mine(first, items, first)

    def _items(self) -> Iterator[Any]:
        return iter(self._dataset)

    def _mine(self, round_: list[Any], items: Iterator[Any], first: list[Any]) -> Iterator[Any]:
        while len(round_) == self._size:
            yield round_[self._rank]
            round_ = list(islice(items, self._size))
        self._is_over = True
        if round_:
            repeated = cycle(first)
            yield [*round_, *islice(repeated, self._size - len(round_))][self._rank]

    def __len__(self) -> int:
        # Without a length, this raises the usual TypeError.
        return -(-len(self._dataset) // self._size)

    def __getattr__(self, name: str) -> Any:
        if name == "_dataset":  # a copy doesn't have it yet
            raise AttributeError(name)
        return getattr(self._dataset, name)


class RanksPartOfPipe(RanksPart):
    """Yields this rank's items of a torch data pipe, which it seeds and shards as a loader does."""

    def __init__(self, pipe: IterDataPipe[Any], *, rank: int, size: int, seed: int) -> None:
        """All ranks pass the same pipe, and the same seed of the first iteration."""
        super().__init__(pipe, rank=rank, size=size)
        self._seed = seed

    def _items(self) -> Iterator[Any]:
        worker = get_worker_info()
        self._seed += 1
        # One seed for all worker processes: pipes shuffle first, then divide by process.
        seed = self._seed if worker is None else worker.seed - worker.id
        apply_random_seed(self._dataset, torch.Generator().manual_seed(seed))
        if worker is not None:
            apply_sharding(self._dataset, worker.num_workers, worker.id)
        return iter(self._dataset)


_OVER: dict[str, Any] = {"polytrain": "over"}
"""The state of an iteration that has no items left."""


class StatefulRanksPart(RanksPart):
    """Yields this rank's items of a data set with a state."""

    def __init__(self, dataset: IterableDataset[Any], *, rank: int, size: int) -> None:
        super().__init__(dataset, rank=rank, size=size)
        self._resumed: Mapping[str, Any] | None = None
        self._current: Any = dataset

    def __iter__(self) -> Iterator[Any]:
        self._is_over = False
        return self._left()

    def _left(self) -> Iterator[Any]:
        state, self._resumed = self._resumed, None
        self._current = self._dataset
        if state is None:
            yield from super().__iter__()
            return
        if isinstance(state, dict) and state == _OVER:
            return
        first = list(islice(iter(self._dataset), self._size))
        self._current = _resumable(self._dataset)
        self._current.load_state_dict(state)
        items = iter(self._current)
        yield from self._mine(list(islice(items, self._size)), items, first)

    def state_dict(self) -> dict[str, Any]:
        """Return the data set's state, between two rounds."""
        if self._is_over:
            # Its own may already be that of the next iteration's start.
            return _OVER
        state: dict[str, Any] = self._current.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin the next iteration at this state."""
        self._resumed = state


def part_of_stream(dataset: Any, *, is_split: bool, seed: int) -> Any:
    """Return this rank's part of an iterable data set, which yields only that if it `is_split`.

    All ranks pass the same seed, which data pipes need.
    """
    rank, size = (0, 1) if is_split else (dist.get_rank(), dist.get_world_size())
    if has_state(dataset):
        return StatefulRanksPart(dataset, rank=rank, size=size)
    if is_split:
        return dataset
    if isinstance(dataset, IterDataPipe):
        return RanksPartOfPipe(dataset, rank=rank, size=size, seed=seed)
    return RanksPart(dataset, rank=rank, size=size)


def has_state(of: Any) -> bool:
    """Whether an object has `state_dict` and `load_state_dict`."""
    return callable(getattr(of, "state_dict", None)) and callable(
        getattr(of, "load_state_dict", None)
    )


def _resumable(dataset: Any) -> Any:
    """Return the data set to load a state into, for one epoch.

    It is a copy of a Hugging Face data set, where the state would apply to all later epochs.
    """
    is_hugging_face = type(dataset).__module__.partition(".")[0] == "datasets"
    return copy.deepcopy(dataset) if is_hugging_face else dataset


def warn_that_it_is_split() -> None:
    """Warn that iterable data sets are split: one that splits itself would be split twice."""
    if dist.get_world_size() > 1:
        _warn_once(
            f"An iterable data set is split by rank: of every {dist.get_world_size()} items, each "
            "rank gets one. If the data set looks at the rank itself, pass "
            "prepare_data_loader(…, add_dist_sampler=False)."
        )


def warn_of_lost_place(loader: DataLoader[Any]) -> None:
    """Warn that a restart begins an epoch again, and say how to keep the place."""
    if has_state(loader.dataset):
        why = (
            "the loader's worker processes have the state of its data set. Use a loader with a "
            "state (torchdata's StatefulDataLoader), or num_workers=0"
        )
    else:
        why = (
            "its data set has no state. Give the data set state_dict and load_state_dict, or use a "
            "loader that has them (torchdata's StatefulDataLoader)"
        )
    _warn_once(
        f"A data loader of {a_type(loader.dataset)} loses its place: a restart in the "
        f"middle of an epoch begins the epoch again, because {why}."
    )


def _warn_once(message: str) -> None:
    if message not in _warned and dist.get_rank() == 0:
        logger.warning("%s", message)
    _warned.add(message)
