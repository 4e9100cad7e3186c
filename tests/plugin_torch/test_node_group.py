"""The process group for gradients, in worlds of real processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

from polytrain.testing.local_world import run_world
from polytrain_torch import Torch

DATA = pa.table({"x": [0.0] * 4})


def reported(path: Path, function: Callable[[], None], world_size: int = 2) -> list[dict[str, Any]]:
    """The last metrics of every rank."""
    world = run_world(
        Torch(), data=DATA, path=path, world_size=world_size, training_function=function
    )
    assert [rank.failure for rank in world.ranks] == [None] * world_size
    return [dict(rank.reports[-1].metrics) for rank in world.ranks]


def trains_twice() -> None:
    """By shared memory, and by gloo."""
    import torch
    import torch.distributed as dist

    import polytrain
    from polytrain_torch import prepare_model

    rank = dist.get_rank()

    def trained(**arguments: Any) -> tuple[str, list[torch.Tensor]]:
        torch.manual_seed(rank)  # rank 0's weights and statistics are sent to all
        module = torch.nn.Sequential(
            *(torch.nn.Linear(8, 600), torch.nn.BatchNorm1d(600), torch.nn.ReLU()),
            *(torch.nn.Linear(600, 600), torch.nn.ReLU(), torch.nn.Linear(600, 1)),
        )
        model = prepare_model(module, parallel_strategy_kwargs=arguments)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(10 + rank)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(16, 8)).square().mean().backward()
            optimizer.step()
        parts = (*module.parameters(), *module.buffers())
        return dist.get_backend(model.process_group), [part.detach() for part in parts]

    (backend, ours), (other, gloos) = trained(), trained(process_group=dist.group.WORLD)
    polytrain.report(
        {
            "backends": [backend, other],
            "same_bits": all(torch.equal(a, b) for a, b in zip(ours, gloos, strict=True)),
            "apart": max((a - b).abs().max().item() for a, b in zip(ours, gloos, strict=True)),
        }
    )


def test_two_ranks_train_to_the_bits_that_gloo_trains_them_to(tmp_path: Path) -> None:
    for found in reported(tmp_path, trains_twice):
        assert found["backends"] == ["polytrain_node", "gloo"]
        assert found["same_bits"]


def test_three_ranks_differ_by_the_order_of_sums(tmp_path: Path) -> None:
    for found in reported(tmp_path, trains_twice, 3):
        assert found["apart"] < 1e-6


def uses_what_ddp_has() -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.distributed.algorithms.join import Join

    import polytrain
    from polytrain_torch import prepare_model

    rank, found = dist.get_rank(), {}

    def gradient(model: Any, rows: float = 1.0) -> float:
        model.zero_grad()
        model(torch.full((1, 1), rows)).sum().backward()
        return float(next(model.parameters()).grad)

    model = prepare_model(torch.nn.Linear(1, 1))
    group = model.process_group
    found["mean"] = gradient(model, 1.0 + rank)
    with Join([model], divide_by_initial_world_size=False):
        for _ in range(1 + 2 * rank):
            found["joined"] = gradient(model, 1.0 + rank)

    model = prepare_model(torch.nn.Linear(1, 1))
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    found["compressed"] = gradient(model, 1.0 + rank)
    found["shared"] = model.process_group is group

    embedding = prepare_model(torch.nn.Embedding(4, 1, sparse=True))
    embedding(torch.tensor([rank])).sum().backward()
    found["sparse"] = embedding.module.weight.grad.to_dense().flatten().tolist()

    names: list[Any] = [None, None]
    dist.all_gather_object(names, f"rank {rank}", group=group)
    largest = torch.tensor(rank)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    counted = torch.tensor(1)
    dist.all_reduce(counted, group=group)
    dist.barrier(group=group)
    found["others"] = [names, largest.item(), counted.item()]
    polytrain.report(found)


def test_whatever_ddp_has_works(tmp_path: Path) -> None:
    for rank, found in enumerate(reported(tmp_path, uses_what_ddp_has)):
        assert found == {
            "mean": 1.5,
            "joined": [1.5, 2.0][rank],  # rank 1 goes on alone
            "compressed": 1.5,
            "shared": True,
            "sparse": [0.5, 0.5, 0.0, 0.0],
            "others": [["rank 0", "rank 1"], 1, 2],
        }


def cannot_reach_the_memory() -> None:
    import os

    import torch
    import torch.distributed as dist

    import polytrain
    from polytrain_torch import prepare_model

    if dist.get_rank() == 1:
        opened = os.open

        def refuse(path: Any, *arguments: Any, **options: Any) -> int:
            if str(path).startswith("/proc/"):
                raise PermissionError(13, "Permission denied", path)
            return opened(path, *arguments, **options)

        os.open = refuse
    model = prepare_model(torch.nn.Linear(1, 1))
    model(torch.full((1, 1), 1.0 + dist.get_rank())).sum().backward()
    polytrain.report({"mean": next(model.parameters()).grad.item()})


def test_where_memory_cannot_be_shared_gloo_adds_up(tmp_path: Path) -> None:
    assert reported(tmp_path, cannot_reach_the_memory) == [{"mean": 1.5}] * 2


def takes_another_number_of_steps() -> None:
    import torch
    import torch.distributed as dist

    from polytrain_torch import prepare_model

    model = prepare_model(torch.nn.Linear(1, 1))
    for _ in range(2 + dist.get_rank()):
        model(torch.ones(1, 1)).sum().backward()


def test_a_step_that_only_one_rank_takes_is_told(tmp_path: Path) -> None:
    world = run_world(
        Torch(timeout_s=2),
        data=DATA,
        path=tmp_path,
        training_function=takes_another_number_of_steps,
    )
    failed = world.ranks[1].failure
    assert failed is not None
    assert "rank 1 has waited 2 s for rank 0 to add up gradients" in failed.failure.message
