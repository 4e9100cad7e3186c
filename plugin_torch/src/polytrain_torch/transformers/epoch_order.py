"""Draws the rows of an epoch again after a restart, in the order that random numbers gave them.

Accelerate seeds most orders by the epoch. But some, such as that of `group_by_length`, depend on
the random numbers when the epoch began, or on a generator of the sampler's own, as those of TRL's
`GRPOTrainer`. The trainer's files have neither.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from accelerate.data_loader import DataLoaderShard, SeedableRandomSampler
from torch.utils.data import BatchSampler, IterableDataset, SequentialSampler
from transformers import Trainer, TrainerCallback

from polytrain_plugins import Batches
from polytrain_torch.loaders.users_samplers import samplers_in
from polytrain_torch.randomness import (
    generator_state,
    generators_of,
    generators_within,
    random_state,
    restore_generator,
    restore_random_state,
)


class EpochOrder(TrainerCallback):
    """Knows the random numbers when the current epoch began. It comes last."""

    def __init__(self, trainer: Trainer, *, is_between_epochs: Callable[[], bool]) -> None:
        """
        Args:
            is_between_epochs: returns whether the call resumes before an epoch's first step.
        """
        self._is_between_epochs = is_between_epochs
        self._trainer = trainer
        self._loader: Any = None
        self._begun: dict[str, Any] | None = None
        self._resumed: Mapping[str, Any] = {}

    def state(self) -> dict[str, Any]:
        """Return this rank's, to be saved; empty if the order doesn't depend on them."""
        if self._begun is None:
            # What a restart has left to do may save before the next epoch begins.
            return {**self._resumed}
        return {**self._begun, "next": _state_of(self._loader)}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Begin the next epoch as one that `state` knows, or as the one after it."""
        self._resumed = state

    def on_epoch_begin(
        self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **_: Any
    ) -> None:
        """Restore the random numbers if the epoch is resumed, and note them."""
        resumed, self._resumed, self._loader = self._resumed, {}, train_dataloader
        is_within = not self._is_between_epochs()
        if resumed and is_within:
            restore_random_state(resumed["random"])
        if resumed:
            saved = resumed["order" if is_within else "next"]
            for generator, its in zip(_generators(train_dataloader), saved, strict=False):
                restore_generator(generator, its)
        self._begun = None
        # A shard knows its order and its position itself.
        is_shard = isinstance(self._trainer.train_dataset, Batches)
        if not is_shard and not draws_again(train_dataloader):
            self._begun = {"random": random_state(), "order": _state_of(train_dataloader)}


def _state_of(loader: Any) -> list[dict[str, Any]]:
    return [*map(generator_state, _generators(loader))]


def _generators(loader: Any) -> list[Any]:
    """Return the generators, apart from the default ones, that draw the rows of an epoch."""
    found = [each for one in samplers_in(loader) for each in generators_of(one)]
    dataset = getattr(loader, "dataset", None)
    if isinstance(dataset, IterableDataset):
        # A restart reads it from its beginning.
        found += generators_within(dataset)
    return found


def draws_again(loader: Any) -> bool:
    """Whether a loader has the same rows in the same order when an epoch is begun again."""
    batches: Any = getattr(loader, "batch_sampler", None)
    # Accelerate's takes this rank's batches from another one.
    batches = getattr(batches, "batch_sampler", batches)
    return (
        isinstance(loader, DataLoaderShard)
        and not loader.persistent_workers
        and type(batches) is BatchSampler
        and type(batches.sampler) in (SeedableRandomSampler, SequentialSampler)
    )
