"""Training that only takes batches. Run as a script, it is the bare scan of the files.

Imports nothing but the standard library at first: what a reader needs, its process imports.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_PASSES_OF_A_SCAN = 3

Batches = Callable[[], Iterable[Any]]
"""What a worker iterates over, made there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One worker's way through its part of the data. Times are seconds since 1970."""

    begun: float
    ended: float
    rows: int
    sum_of_ids: int


def training_function(batches: Batches) -> Callable[[dict[str, Any]], None]:
    """A training function that goes through its batches once, and notes when.

    Made here so that it travels by value: no worker has this module.
    """

    def train(config: dict[str, Any]) -> None:
        rows = sum_of_ids = 0
        ours = batches()
        begun = time.time()
        for batch in ours:
            rows += len(batch["id"])
            sum_of_ids += int(batch["id"].sum())
        ended = time.time()
        note = {"begun": begun, "ended": ended, "rows": rows, "sum_of_ids": sum_of_ids}
        Path(config["directory"], f"pass-{os.environ['RANK']}").write_text(json.dumps(note))

    return train


def our_batches(batch_size: int, *, tensors: bool = False) -> Batches:
    """Ours: arrays, or tensors."""

    def batches() -> Iterable[Any]:
        import polytrain

        shard = polytrain.get_dataset_shard("train")
        take = shard.iter_torch_batches if tensors else shard.iter_batches
        return take(batch_size=batch_size)

    return batches


def ray_batches(batch_size: int, *, tensors: bool = False) -> Batches:
    """Ray Train's: arrays, or tensors."""

    def batches() -> Iterable[Any]:
        import ray.train

        shard = ray.train.get_dataset_shard("train")
        take = shard.iter_torch_batches if tensors else shard.iter_batches
        return take(batch_size=batch_size)

    return batches


def loader_batches(paths: list[str], batch_size: int, *, num_workers: int) -> Batches:
    """A torch `DataLoader`'s: tensors. Each worker process reads files of its own.

    Args:
        paths: of all ranks.
        batch_size: rows.
        num_workers: processes for each rank; 0 reads in the rank's own.
    """

    def batches() -> Iterable[Any]:
        import pyarrow.parquet as pq
        import torch
        from torch.utils.data import DataLoader, IterableDataset, get_worker_info

        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

        class Rows(IterableDataset[dict[str, torch.Tensor]]):
            def __iter__(self) -> Any:
                info = get_worker_info()
                number, count = (info.id, info.num_workers) if info else (0, 1)
                for path in paths[rank::world_size][number::count]:
                    for batch in pq.ParquetFile(path).iter_batches(batch_size):
                        yield {
                            name: torch.tensor(column.to_numpy())
                            for name, column in zip(batch.schema.names, batch.columns, strict=True)
                        }

        return DataLoader(Rows(), batch_size=None, num_workers=num_workers)

    return batches


def items(rows: int) -> Any:
    """A map-style data set, made here so that it travels by value."""
    import numpy as np

    class Items:
        def __init__(self) -> None:
            self.x = np.zeros(16, np.float32)

        def __len__(self) -> int:
            return rows

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"id": index, "x": self.x}

    return Items()


def loader_items(rows: int, batch_size: int, *, num_workers: int) -> Batches:
    """Such items by a torch `DataLoader`, in any order."""
    dataset = items(rows)

    def batches() -> Iterable[Any]:
        from torch.utils.data import DataLoader, DistributedSampler

        sampler = DistributedSampler(
            dataset,
            num_replicas=int(os.environ["WORLD_SIZE"]),
            rank=int(os.environ["RANK"]),
            shuffle=True,
        )
        return DataLoader(dataset, batch_size, sampler=sampler, num_workers=num_workers)

    return batches


def scan(directory: str, threads: int) -> Pass:
    """Read the files by Arrow alone: the fastest of some passes, as the first has no memory yet."""
    import pyarrow as pa
    import pyarrow.dataset

    pa.set_cpu_count(threads)
    files = pyarrow.dataset.dataset(directory)
    passes = []
    for _ in range(_PASSES_OF_A_SCAN):
        rows = sum_of_ids = 0
        begun = time.time()
        for batch in files.to_batches():
            rows += batch.num_rows
            sum_of_ids += int(batch["id"].to_numpy().sum())
        ended = time.time()
        passes.append(Pass(begun=begun, ended=ended, rows=rows, sum_of_ids=sum_of_ids))
    return min(passes, key=lambda each: each.ended - each.begun)


if __name__ == "__main__":
    print(json.dumps(asdict(scan(sys.argv[1], int(sys.argv[2])))))
