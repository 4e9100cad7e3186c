"""Places of the data loaders that Accelerate has prepared, in checkpoints.

Accelerate iterates as it always does. Around that, a place counts the batches that the loop has got
and gives each epoch an order of its own; after a restart it passes over what was trained on.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from itertools import chain, islice
from types import CodeType
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from polytrain.extension import Epoch, Plan, open_cursor
from polytrain_plugins.type_names import a_type
from polytrain_torch.collectives.call_agreement import agree_on_call
from polytrain_torch.collectives.gathering import gathered
from polytrain_torch.libraries import needed
from polytrain_torch.loaders.users_samplers import samplers_in
from polytrain_torch.private import copied_loader, replace_iteration
from polytrain_torch.randomness import (
    function_seed,
    generators_of,
    random_state,
    restore_random_state,
    seed_generator,
    seed_in,
    seed_of,
)
from polytrain_torch.survivors import keeper
from polytrain_torch.survivors.byte_code import instruction_of
from polytrain_torch.survivors.points import epoch_is_over, has_batch, next_batch

with needed("accelerate"):
    from accelerate.data_loader import (
        BatchSamplerShard,
        DataLoaderDispatcher,
        DataLoaderShard,
        SeedableRandomSampler,
        SkipBatchSampler,
    )

logger = logging.getLogger(__name__)

_CONTINUES = (
    "%s continues after batch %d of its epoch: the batches before it don't come again. A loop that "
    "skips them itself (`if step < done: continue`) would leave out others. Take out that line, or "
    "use accelerate.skip_first_batches."
)

_WITHIN = (
    "%s is iterated over within a loop over it, or twice at once. A checkpoint has one place in it "
    "and can't tell which of the two trains, so after a restart its epoch begins again, with all "
    "of its batches. "
    "To keep the place, prepare another loader of the same data for the inner loop."
)

_ALONE = "not all ranks have prepared its data loader"

_KNOWN_SAMPLERS = (
    *(BatchSampler, BatchSamplerShard, SequentialSampler),
    *(RandomSampler, SeedableRandomSampler, SubsetRandomSampler, WeightedRandomSampler),
)
"""Samplers that draw the same items again from a generator with the same seed."""

_PLACE, _WHY_NOT = "polytrain_place", "polytrain_why_no_place"
"""Attributes of loaders and of their batch samplers: the place, or why there is none."""

_Iterate = Callable[[Any], Iterator[Any]]
"""Accelerate's own `__iter__` of a loader."""


def keep_places(loaders: Sequence[Any], *, keeps_own: bool) -> None:
    """Give the loaders of an accelerator places in checkpoints. All ranks call this.

    Args:
        loaders: as `Accelerator.prepare` returned them, in their order.
        keeps_own: whether a place in the checkpoint counts more than a number of batches that the
            training function skips itself: it may have counted them before.
    """
    agree_on_call("polytrain_torch.accelerate.restore")
    by_rank = gathered([(_why_not(each), _seed(each)) for each in loaders])
    for number, loader in enumerate(loaders):
        # One rank alone may have prepared some.
        of_all = [each[number] if number < len(each) else (_ALONE, 0) for each in by_rank]
        why_not = next((why for why, _ in of_all if why), None)
        if why_not is not None:
            setattr(loader, _WHY_NOT, why_not)
        elif not hasattr(loader, _PLACE):
            _, seed = of_all[0]
            _Place(loader, f"Accelerate's data loader {number}", seed=seed, keeps_own=keeps_own)


def _why_not(loader: Any) -> str | None:
    """Return why a restart couldn't find the place in a loader; None if it could."""
    if type(loader) not in (DataLoaderShard, DataLoaderDispatcher):
        return f"its data loader is {a_type(loader)}"
    if isinstance(loader.dataset, IterableDataset):
        return "nobody can tell where its data loader of an IterableDataset is"
    if loader.use_stateful_dataloader:
        return "its data loader is a StatefulDataLoader, whose state only the script loads"
    if not loader.in_order:
        return "its data loader has in_order=False, and gives batches in any order"
    batches = loader.base_dataloader.batch_sampler
    if batches is None:
        return "its data loader has no batch sampler"
    unknown = [each for each in samplers_in(batches) if type(each) not in _KNOWN_SAMPLERS]
    if unknown:
        return f"a restart couldn't draw the rows of its {type(unknown[0]).__name__} again"
    whole = _undivided(batches)
    if type(whole) is not BatchSampler:
        return f"its batch sampler is {a_type(whole)}"
    if not getattr(batches, "even_batches", True):
        return "even_batches=False gives the ranks different numbers of batches"
    return None


def _undivided(batches: Any) -> Any:
    """Return the sampler of all ranks' batches."""
    return getattr(batches, "batch_sampler", batches)


def _seed(loader: Any) -> int:
    """Return a seed for the order of a loader's epochs, from its sampler's, else from torch's."""
    samplers = samplers_in(getattr(loader, "batch_sampler", None))
    for each in samplers:
        if isinstance(each, SeedableRandomSampler):
            return int(each.initial_seed)
    return seed_in([it for each in samplers for it in generators_of(each)]) or function_seed()


class _Place:
    """The place of a loader. Positions count the rows that all ranks have got."""

    def __init__(self, loader: Any, name: str, *, seed: int, keeps_own: bool) -> None:
        self.loader = loader
        self._name = name
        self._keeps_own = keeps_own
        self._batches: Any = loader.base_dataloader.batch_sampler
        self._is_dispatched = isinstance(loader, DataLoaderDispatcher)
        source = loader if self._is_dispatched else self._batches
        is_split = getattr(source, "split_batches", False)
        self._whole = _undivided(self._batches)
        self.batch_rows: int = self._whole.batch_size
        """Rows in a batch, before it is divided among ranks."""

        self.step_rows = self.batch_rows * (1 if is_split else dist.get_world_size())
        """Rows of which all ranks get a batch each."""

        plan = Plan(rows=len(self._whole.sampler), shards=1, seed=seed)
        self._cursor = open_cursor(plan, name=name)
        self._cursor.begins_anywhere = True
        self._samplers = samplers_in(self._batches)
        for each in self._samplers:
            if isinstance(each, SeedableRandomSampler):
                each.initial_seed = self._cursor.position.plan.seed
            elif hasattr(each, "generator"):
                # Without one it would draw from torch's.
                each.generator = each.generator or torch.Generator()
        base = loader.base_dataloader
        self._workers: torch.Generator | None = None
        """Seeds the loader's processes, which would take a number of torch's at each look."""

        if base.generator is None:
            base.generator = self._workers = torch.Generator()
        self._asked: int | None = None
        """The epoch that the training function has set for the next iteration."""

        self._begins = False
        """Whether Accelerate begins an iteration, and sets the epoch itself."""

        self._fetch: tuple[CodeType, int] | None = None
        """The code that fetched the first batch of the last iteration, and the instruction."""

        self._is_lost = False
        """Whether the place is only that of an epoch: two loops have run at once."""

        self._has_continued = False
        """Whether an iteration has begun within an epoch by itself."""

        self._trains: bool | None = None
        """Whether the loop takes steps; None until that is known."""

        self._own_set_epoch = loader.set_epoch
        loader.set_epoch = self._set_epoch
        for each in (loader, self._batches):
            setattr(each, _PLACE, self)

    def iterate(self, own: _Iterate, *, skipped: int | None = None) -> Iterator[Any]:
        """Yield the batches of the next epoch; after a restart, the rest of the interrupted one.

        The training function may skip some rows itself.
        """
        caller = sys._getframe().f_back
        fetch = None if caller is None else (caller.f_code, instruction_of(caller))
        # As in `zip(loader, loader)`: the other one is about to continue.
        is_beside = self._cursor.is_under_way and fetch == self._fetch
        self._fetch = fetch
        with self._cursor.epoch() as epoch:
            if is_beside:
                self._lose(epoch)
            start = epoch.start
            if skipped is not None and not (start and self._keeps_own):
                self._given(epoch, start := skipped)
            elif start and skipped is None:
                self._say_that_it_continues(start)
            self._begin(epoch.number if self._asked is None else self._asked)
            # Before the first step of all, nobody knows what trains.
            if self._trains is not False or not _steps():
                next_batch()
            for batch in self._from(start, own):
                has_batch()
                start += self.step_rows
                self._given(epoch, start)
                before = _steps()
                yield batch
                if epoch.is_overtaken:
                    self._lose(epoch)
                # An evaluation's loop takes none.
                self._trains = self._trains or _steps() > before
                if self._trains:
                    next_batch()
            if self._trains:
                epoch_is_over()

    def _given(self, epoch: Epoch, start: int) -> None:
        if not self._is_lost:
            epoch.given(start)

    def _lose(self, epoch: Epoch) -> None:
        """Keep the place no more within epochs: a loop continues, and another has begun within."""
        epoch.is_loop = False
        if self._is_lost:
            return
        self._is_lost = True
        self._cursor.reported()
        position = self._cursor.position
        self._cursor.resume_at(position.moved(position.epoch, 0))
        keeps = keeper.keeper()
        if keeps is not None:
            keeps.refuse(f"it iterates over {self._name} within a loop over it")
        if dist.get_rank() == 0:
            logger.warning(_WITHIN, self._name)

    def _say_that_it_continues(self, start: int) -> None:
        if dist.get_rank() == 0 and not self._has_continued:
            logger.warning(_CONTINUES, self._name, start // self.step_rows)
        self._has_continued = True

    def _begin(self, epoch: int) -> None:
        """Have an epoch drawn in its order, the same one on all ranks."""
        self._asked, self.loader.iteration = None, epoch
        seed = seed_of(f"{self._cursor.position.plan.seed} {epoch}", octets=7)
        for each in self._samplers:
            for generator in generators_of(each):
                seed_generator(generator, seed)
        if self._workers is not None:
            self._workers.manual_seed(seed_of(f"{seed} {dist.get_rank()}", octets=7))

    def _from(self, start: int, own: _Iterate) -> Iterator[Any]:
        """Return Accelerate's iterator, which passes over the rows before a position."""
        batches = own(self.loader)
        random = random_state() if start else None
        with self._beginning(start):
            first = [*islice(batches, 1)]
        if random is not None:
            # Accelerate draws numbers to begin, and has done so before the restart.
            restore_random_state(random)
        return chain(first, batches)

    @contextmanager
    def _beginning(self, start: int) -> Iterator[None]:
        loader, base = self.loader, self.loader.base_dataloader
        steps, rest = divmod(start, self.step_rows)
        if self._is_dispatched and not rest:
            # It completes its last batch with the first one.
            loader.skip_batches = steps
        elif start:
            loader.base_dataloader = copied_loader(base, batch_sampler=self._rest(start))
        self._begins = True
        try:
            yield
        finally:
            self._begins, loader.base_dataloader, loader.skip_batches = False, base, 0

    def _rest(self, start: int) -> Any:
        steps, rest = divmod(start, self.step_rows)
        if not rest:
            return SkipBatchSampler(self._batches, steps)
        # The position is another number of workers', or of batches of another size.
        batches, rest = divmod(start, self.batch_rows)
        left = SkipBatchSampler(self._whole, batches)
        if rest:
            left = copy(self._whole)
            left.sampler = _RowsLeft(left.sampler, start)
        if self._batches is self._whole:
            return left
        shard = copy(self._batches)
        shard.batch_sampler = left
        return shard

    def _set_epoch(self, epoch: int) -> None:
        if not self._begins:
            self._asked = epoch
        self._own_set_epoch(epoch)


class _RowsLeft(Sampler[Any]):
    """The rows of a sampler from a position on."""

    def __init__(self, sampler: Any, start: int) -> None:
        self._sampler = sampler
        self._start = start

    def __iter__(self) -> Iterator[Any]:
        return islice(self._sampler, self._start, None)

    def __len__(self) -> int:
        return max(0, len(self._sampler) - self._start)


def _iterate(own: _Iterate, loader: Any) -> Iterator[Any]:
    place: _Place | None = vars(loader).get(_PLACE)
    if place is not None:
        return place.iterate(own)
    batches = loader.base_dataloader.batch_sampler
    if type(batches) is SkipBatchSampler:
        place = getattr(batches.batch_sampler, _PLACE, None)
    if place is not None:
        # It is one of `accelerate.skip_first_batches`, which counts what it is given.
        is_dispatched = isinstance(loader, DataLoaderDispatcher)
        rows = place.batch_rows if is_dispatched else place.step_rows
        return place.iterate(own, skipped=batches.skip_batches * rows)
    why_not: str | None = vars(loader).get(_WHY_NOT)
    return own(loader) if why_not is None else _without_place(own, loader, why_not)


def _without_place(own: _Iterate, loader: Any, why_not: str) -> Iterator[Any]:
    keeps = keeper.keeper()
    if keeps is not None:
        keeps.continuation.why_elsewhere = why_not
    yield from own(loader)


def _steps() -> int:
    """Return the number of the optimizers' steps in this attempt, if it keeps its state."""
    keeps = keeper.keeper()
    return 0 if keeps is None else keeps.steps


for kind in (DataLoaderShard, DataLoaderDispatcher):
    replace_iteration(kind, _iterate)
