"""Data loaders that are split by rank and keep everything else that their user chose."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
)


class EpochSampler(DistributedSampler[Any]):
    """A `DistributedSampler` that counts its epochs itself."""

    def __iter__(self) -> Iterator[Any]:
        indices = super().__iter__()
        self.set_epoch(self.epoch + 1)
        return indices


class SplitSampler(Sampler[Any]):
    """A user's own sampler, dealt out: rank 0 draws, everybody takes every world_size-th.

    Rank 0's draw counts because samplers may be random, and the ranks must not disagree about
    what an epoch consists of. A draw that doesn't divide evenly begins again at its start, as in
    `DistributedSampler`, so that all ranks get equally many.
    """

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        rank, size = dist.get_rank(), dist.get_world_size()
        drawn: list[Any] = [list(self.sampler) if rank == 0 else None]
        dist.broadcast_object_list(drawn, src=0)
        items = drawn[0]
        padding = -len(items) % size
        return iter([*items, *(items * size)[:padding]][rank::size])

    def __len__(self) -> int:
        return -(-len(self.sampler) // dist.get_world_size())


class PreparedDataLoader:
    """A data loader whose batches are on this worker's device. Everything else is the loader's."""

    def __init__(self, loader: DataLoader[Any], *, device: torch.device | None) -> None:
        self._loader = loader
        self._device = device

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # while a copy is being made there is none yet
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            yield batch if self._device is None else _moved(batch, self._device)


def sharded(loader: DataLoader[Any]) -> DataLoader[Any]:
    """The same loader, giving this rank its part only."""
    if isinstance(loader.sampler, DistributedSampler):
        return loader
    arguments: dict[str, Any] = {
        "dataset": loader.dataset,
        "num_workers": loader.num_workers,
        "collate_fn": loader.collate_fn,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "generator": loader.generator,
        "prefetch_factor": loader.prefetch_factor,
        "persistent_workers": loader.persistent_workers,
        "pin_memory_device": loader.pin_memory_device,
        "in_order": loader.in_order,
    }
    if loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler:
        return DataLoader(**arguments, batch_sampler=SplitSampler(loader.batch_sampler))
    return DataLoader(
        **arguments,
        sampler=_split(loader),
        batch_size=loader.batch_size,
        drop_last=loader.drop_last,
    )


def _split(loader: DataLoader[Any]) -> Sampler[Any]:
    sampler = loader.sampler
    # Over another source than the data set, or with a size of its own, it is the user's choice.
    all_in_order = type(sampler) is SequentialSampler
    all_shuffled = (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and sampler.num_samples == len(sampler.data_source)
    )
    if not (all_in_order or all_shuffled) or sampler.data_source is not loader.dataset:
        return SplitSampler(sampler)
    return EpochSampler(loader.dataset, shuffle=all_shuffled, seed=_seed(loader))


def _seed(loader: DataLoader[Any]) -> int:
    """A seed that all ranks share: rank 0's, from the loader's generator or else torch's own."""
    own = loader.generator.initial_seed() if loader.generator is not None else torch.initial_seed()
    seed = torch.tensor([own % (1 << 31)])
    if dist.get_backend() == "nccl":
        seed = seed.cuda()
    dist.broadcast(seed, src=0)
    return int(seed.item())


def _moved(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: _moved(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_moved(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_moved(value, device) for value in batch)
    return batch
