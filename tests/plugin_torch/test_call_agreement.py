"""Calls that all ranks must make, and only some do: an error names both, and nothing hangs."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.sweeps import only_in_sweep

from polytrain.testing.local_world import run_world
from polytrain_torch import Torch

DATA = pa.table({"x": [0.0] * 4})


def does(rank_0: str, rank_1: str) -> Callable[[], None]:
    def train() -> None:
        import torch
        import torch.distributed as dist
        from torch.utils.data import DataLoader

        from polytrain_torch import TrainingState, prepare_data_loader, prepare_model

        def save() -> None:
            TrainingState(model=model).report({})

        model = prepare_model(torch.nn.Linear(1, 1))
        loader = prepare_data_loader(DataLoader([1, 2], sampler=[1, 0]))
        actions: dict[str, Callable[[], Any]] = {
            "prepares": lambda: prepare_data_loader(DataLoader([1, 2])),
            "prepares a model": lambda: prepare_model(torch.nn.Linear(1, 1)),
            "iterates": lambda: [*loader],
            "trains": lambda: model(torch.ones(1, 1)).sum().backward(),
            "saves": save,
            "sums": lambda: dist.all_reduce(torch.ones(1)),
            "waits": dist.barrier,
            "ends": lambda: None,
        }
        actions[rank_0 if dist.get_rank() == 0 else rank_1]()

    return train


@pytest.mark.parametrize(
    ("rank_0", "rank_1", "message"),
    [
        only_in_sweep("prepares", "prepares a model", "prepare_model"),
        ("prepares", "iterates", "the loop over a prepared data loader"),
        only_in_sweep("prepares", "trains", "averages gradients"),
        only_in_sweep("prepares", "saves", "TrainingState.save"),
        ("prepares", "sums", "is in torch.distributed.all_reduce"),
        only_in_sweep("prepares", "waits", "is in torch.distributed.barrier"),
        only_in_sweep("prepares", "ends", "has ended its training function"),
        ("ends", "prepares", "has ended its training function"),
        only_in_sweep("trains", "prepares", "averages gradients"),
    ],
)
def test_a_call_of_one_rank_alone_is_reported(
    tmp_path: Path, rank_0: str, rank_1: str, message: str
) -> None:
    world = run_world(
        Torch(timeout_s=60),
        data=DATA,
        path=tmp_path,
        training_function=does(rank_0, rank_1),
        # Sooner than torch itself.
        seconds=50,
    )
    [failure, *_] = [rank.failure.failure.message for rank in world.ranks if rank.failure]
    assert re.search(r"rank \d is in .* \(test_call_agreement.py, line \d+\)", failure)
    assert "prepare_data_loader (test_call_agreement.py" in failure
    assert message in failure
    assert "every rank" in failure


def comes_late() -> None:
    import time

    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader

    import polytrain
    from polytrain_torch import prepare_data_loader

    if dist.get_rank() == 1:
        time.sleep(2.5)
        store = dist.distributed_c10d._get_default_store()
        destroy = dist.destroy_process_group

        def destroy_slowly() -> None:
            destroy()
            time.sleep(0.5)
            # It raises an exception, and prints stacks, if rank 0 has left.
            store.check(["anything"])

        dist.destroy_process_group = destroy_slowly
    loader = prepare_data_loader(DataLoader(torch.arange(4)))
    polytrain.report({"rows": len([*loader])})


def test_a_rank_may_come_late_and_leave_late(tmp_path: Path) -> None:
    """It is asked meanwhile, and in the end waited for."""
    world = run_world(Torch(), data=DATA, path=tmp_path, training_function=comes_late)
    assert [rank.failure for rank in world.ranks] == [None, None]
    assert [rank.end for rank in world.ranks] == ["exited with code 0"] * 2
    assert [rank.leaks for rank in world.ranks] == [
        {"ports": [], "variables": [], "processes": []}
    ] * 2
