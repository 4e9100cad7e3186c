"""The random numbers that the order of a Transformers trainer's epoch depends on."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.data_loader import BatchSamplerShard, DataLoaderShard, IterableDatasetShard
from torch.utils.data import BatchSampler, IterableDataset, Sampler

from polytrain_torch.checkpoints.safe_serialization import loaded, save_safely
from polytrain_torch.transformers.epoch_order import EpochOrder


def test_a_checkpoint_before_the_first_epoch_after_a_restart_has_those_of_the_last_one() -> None:
    trainer: Any = SimpleNamespace(train_dataset=[])
    order = EpochOrder(trainer, is_between_epochs=lambda: True)
    assert order.state() == {}
    saved = {"random": {"python": (3,)}, "order": None, "next": None}
    order.resume(saved)
    assert order.state() == saved


class Draws(Sampler[int]):
    """Draws each epoch from a generator of its own."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __len__(self) -> int:
        return 16

    def __iter__(self) -> Iterator[int]:
        drawn: list[int] = [*range(16)]
        if isinstance(self.generator, torch.Generator):
            drawn = torch.randperm(16, generator=self.generator).tolist()
        else:
            self.generator.shuffle(drawn)
        yield from drawn


class Stream(IterableDataset[int]):
    def __init__(self, generator: Any) -> None:
        self.draws = Draws(generator)

    def __iter__(self) -> Iterator[int]:
        return iter(self.draws)


def of_sampler(generator: Any) -> DataLoaderShard:
    batches = BatchSampler(Draws(generator), 4, drop_last=False)
    shard = BatchSamplerShard(batches, num_processes=2, process_index=1)
    return DataLoaderShard([*range(16)], batch_sampler=shard)


def of_stream(generator: Any) -> DataLoaderShard:
    stream = IterableDatasetShard(Stream(generator), 4, num_processes=2, process_index=1)
    return DataLoaderShard(stream, batch_size=4)


@pytest.mark.parametrize("loader_of", [of_sampler, of_stream])
@pytest.mark.parametrize(
    "generator",
    [
        lambda: torch.Generator().manual_seed(3),
        lambda: random.Random(3),
        lambda: np.random.default_rng(3),
        lambda: np.random.RandomState(3),
    ],
)
def test_an_order_of_a_generators_own_is_drawn_again(
    tmp_path: Path, generator: Callable[[], Any], loader_of: Callable[[Any], DataLoaderShard]
) -> None:
    trainer: Any = SimpleNamespace(train_dataset=[])

    def epoch(order: EpochOrder, loader: DataLoaderShard) -> list[list[int]]:
        order.on_epoch_begin(None, None, None, train_dataloader=loader)
        return [batch.tolist() for batch in loader]

    order, loader = EpochOrder(trainer, is_between_epochs=lambda: False), loader_of(generator())
    epoch(order, loader)
    second = epoch(order, loader)
    save_safely(order.state(), tmp_path / "order.pt")
    third = epoch(order, loader)
    assert second != third
    for is_between, expected in ((False, [second, third]), (True, [third])):
        again = EpochOrder(trainer, is_between_epochs=lambda between=is_between: between)
        again.resume(loaded(tmp_path / "order.pt"))
        loader = loader_of(generator())
        assert [epoch(again, loader) for _ in expected] == expected
