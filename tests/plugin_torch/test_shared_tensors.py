"""Ranks that share a model's tensors and get different rows: a warning."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from tests.sweeps import only_in_sweep
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import polytrain
from polytrain.testing.local_world import run_world
from polytrain_torch import Torch, TrainingState, prepare_data_loader

ROWS = 8


def tensor_parallel() -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(2, 4))
    return parallelize_module(model, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel()})


def on_two_dimensions() -> torch.nn.Module:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensors"))
    model = torch.nn.Sequential(torch.nn.Linear(2, 4))
    parallelize_module(model, mesh["tensors"], {"0": ColwiseParallel()})
    return fully_shard(model, mesh=mesh["data"])


def sharded() -> torch.nn.Module:
    return fully_shard(torch.nn.Linear(2, 4))


def replicas_of_shards() -> torch.nn.Module:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards"))
    return fully_shard(torch.nn.Linear(2, 4), mesh=mesh)


def of_shard() -> Any:
    return polytrain.get_dataset_shard().iter_torch_batches(batch_size=2)


def of_loader() -> Any:
    return prepare_data_loader(DataLoader(TensorDataset(torch.ones(ROWS, 2)), batch_size=2))


def of_loader_with_a_sampler() -> Any:
    data = TensorDataset(torch.ones(ROWS, 2))
    sampler = DistributedSampler(data, num_replicas=1, rank=0)
    return prepare_data_loader(DataLoader(data, batch_size=2, sampler=sampler))


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("model", "batches", "warns"),
    [
        only_in_sweep(tensor_parallel, of_shard, True),
        (on_two_dimensions, of_shard, True),
        only_in_sweep(tensor_parallel, of_loader, True),
        (tensor_parallel, of_loader_with_a_sampler, False),
        only_in_sweep(sharded, of_shard, False),
        (replicas_of_shards, of_loader, False),
    ],
)
def test_ranks_that_share_tensors_are_told_of_different_rows(
    tmp_path: Path, model: Callable[[], Any], batches: Callable[[], Any], warns: bool
) -> None:
    def train() -> None:
        said: list[str] = []
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: said.append(record.getMessage())
        logging.getLogger("polytrain_torch").addHandler(handler)
        for _ in range(2):
            TrainingState(model=model())
            for _ in batches():
                pass
        polytrain.report({"said": "\n".join(each for each in said if "share tensors" in each)})

    record = run_world(
        Torch(),
        data=pa.table({"x": [*range(ROWS)]}),
        path=tmp_path / "world",
        training_function=train,
    )
    failures = [str(rank.failure) for rank in record.ranks if rank.failure]
    assert not failures, "\n".join(failures)
    first, second = (rank.reports[0].metrics["said"] for rank in record.ranks)
    assert first.count('DistributedSampler(data, mesh["data"]') == warns
    assert second == ""
