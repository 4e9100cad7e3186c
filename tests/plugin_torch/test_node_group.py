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

    model = prepare_model(
        torch.nn.Linear(1, 1),
        parallel_strategy_kwargs={"gradient_as_bucket_view": True, "static_graph": True},
    )
    found["static"] = [gradient(model, 1.0 + rank) for _ in range(2)]
    with model.no_sync():
        found["alone"] = gradient(model, 1.0 + rank)

    names: list[Any] = [None, None]
    dist.all_gather_object(names, f"rank {rank}", group=group)
    largest = torch.tensor(rank)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    counted = torch.tensor(1)
    dist.all_reduce(counted, group=group)
    dist.barrier(group=group)
    everybodys = torch.empty(2)
    dist.all_gather_into_tensor(everybodys, torch.tensor([1.0 + rank]), group=group)
    found["others"] = [names, largest.item(), counted.item(), everybodys.tolist()]
    polytrain.report(found)


def test_whatever_ddp_has_works(tmp_path: Path) -> None:
    for rank, found in enumerate(reported(tmp_path, uses_what_ddp_has)):
        assert found == {
            "mean": 1.5,
            "joined": [1.5, 2.0][rank],  # rank 1 goes on alone
            "compressed": 1.5,
            "shared": True,
            "sparse": [0.5, 0.5, 0.0, 0.0],
            "static": [1.5, 1.5],
            "alone": 1.0 + rank,
            "others": [["rank 0", "rank 1"], 1, 2, [1.0, 2.0]],
        }


def leaves_out_layers_and_rows() -> None:
    """As in torch's tutorial of `Join`, with an optimizer that is sharded by another group."""
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.join import Join
    from torch.distributed.optim import ZeroRedundancyOptimizer

    import polytrain
    from polytrain_torch import prepare_model

    class Either(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList([torch.nn.Linear(1, 1, bias=False) for _ in "ab"])

        def forward(self, x: torch.Tensor, which: int) -> torch.Tensor:
            return self.layers[which](x)

    rank = dist.get_rank()
    model = prepare_model(Either(), parallel_strategy_kwargs={"find_unused_parameters": True})
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=1.0)
    for layer in model.module.layers:
        torch.nn.init.zeros_(layer.weight)
    with Join([model, optimizer]):
        for step in range(1 + rank):
            optimizer.zero_grad()
            model(torch.ones(1, 1), which=(rank + step) % 2).sum().backward()
            optimizer.step()
    polytrain.report({"weights": [layer.weight.item() for layer in model.module.layers]})


def test_ranks_may_leave_out_layers_and_run_out_of_rows(tmp_path: Path) -> None:
    """Each layer by one rank in the first step, by half: the second step is the other's alone."""
    for found in reported(tmp_path, leaves_out_layers_and_rows):
        assert found["weights"] == [-1.0, -0.5]


def copies_the_model() -> None:
    import copy
    import io

    import torch
    import torch.distributed as dist
    from torch.optim.swa_utils import AveragedModel

    import polytrain
    from polytrain_torch import prepare_model

    model = prepare_model(torch.nn.Linear(1, 1))
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    copies = {
        "copied": copy.deepcopy(model),
        "stored": torch.load(stored, weights_only=False),
        "averaged": AveragedModel(model).module,
    }
    found = {}
    for name, copied in copies.items():
        copied(torch.full((1, 1), 1.0 + dist.get_rank())).sum().backward()
        found[name] = copied.module.weight.grad.item()
    polytrain.report(found)


def test_what_is_copied_is_trained_by_all_too(tmp_path: Path) -> None:
    assert (
        reported(tmp_path, copies_the_model)
        == [{"copied": 1.5, "stored": 1.5, "averaged": 1.5}] * 2
    )


def trains_alone() -> None:
    import torch
    from torch.distributed.algorithms.join import Join

    import polytrain
    from polytrain_torch import prepare_model

    model = prepare_model(torch.nn.Linear(1, 1))
    with Join([model]):
        with model.no_sync():
            model(torch.ones(1, 1)).sum().backward()
        model(torch.ones(1, 1)).sum().backward()
    sharded = prepare_model(torch.nn.Linear(1, 1), parallel_strategy="fsdp")
    sharded(torch.full((1, 1), 3.0)).sum().backward()
    polytrain.report(
        {
            "accumulated": model.module.weight.grad.item(),
            "sharded": sharded.weight.grad.full_tensor().item(),
        }
    )


def test_one_worker_trains_as_many_do(tmp_path: Path) -> None:
    assert reported(tmp_path, trains_alone, 1) == [{"accumulated": 2.0, "sharded": 3.0}]


def trains_a_step() -> None:
    import torch

    from polytrain_torch import prepare_model

    prepare_model(torch.nn.Linear(1, 1))(torch.ones(1, 1)).sum().backward()


def test_no_port_stays_open(tmp_path: Path) -> None:
    world = run_world(Torch(), data=DATA, path=tmp_path, training_function=trains_a_step)
    assert [rank.failure for rank in world.ranks] == [None, None]
    assert [(rank.leaks or {}).get("ports") for rank in world.ranks] == [[], []]


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
    polytrain.report(
        {
            "mean": next(model.parameters()).grad.item(),
            "is_shared": model.process_group._sums is not None,
        }
    )


def test_where_memory_cannot_be_shared_gloo_adds_up(tmp_path: Path) -> None:
    expected = [{"mean": 1.5, "is_shared": False}] * 2
    assert reported(tmp_path, cannot_reach_the_memory) == expected


def takes_another_number_of_steps() -> None:
    import torch
    import torch.distributed as dist

    from polytrain_torch import prepare_model

    model = prepare_model(torch.nn.Linear(1, 1))
    for step in range(2 + dist.get_rank()):
        if step == 2:
            # The ranks' start may take them longer.
            model.process_group._sums._timeout_s = 1
        model(torch.ones(1, 1)).sum().backward()


def test_a_step_that_only_one_rank_takes_is_reported(tmp_path: Path) -> None:
    world = run_world(
        Torch(timeout_s=60),
        data=DATA,
        path=tmp_path,
        training_function=takes_another_number_of_steps,
    )
    failed = world.ranks[1].failure
    assert failed is not None
    assert "rank 1 has waited 1 s for rank 0 to add up gradients" in failed.failure.message


def leaves_out_a_layer_before_a_collective() -> None:
    """Rank 1's gradients are ready, and rank 0's after a collective of the model's own group."""
    import torch
    import torch.distributed as dist

    import polytrain
    from polytrain_torch import prepare_model

    rank, own = dist.get_rank(), dist.new_group()

    class Meeting(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            dist.barrier(group=own)
            return gradient

    class LeavesOut(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(4, 4, bias=False)
            self.last = torch.nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x) if rank == 0 else x.requires_grad_()
            return self.last(Meeting.apply(x))

    def trained(**arguments: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = prepare_model(
            LeavesOut(),
            parallel_strategy_kwargs={"find_unused_parameters": True, **arguments},
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.full((2, 4), 1.0 + rank)).sum().backward()
            optimizer.step()
        return [each.detach() for each in model.parameters()]

    gloos, ours = trained(process_group=dist.group.WORLD), trained()
    same = all(torch.equal(a, b) for a, b in zip(gloos, ours, strict=True))
    polytrain.report({"same_bits": same})


def test_a_model_may_have_collectives_and_leave_out_layers_as_in_plain_ddp(tmp_path: Path) -> None:
    expected = [{"same_bits": True}] * 2
    assert reported(tmp_path, leaves_out_a_layer_before_a_collective) == expected


def lacks_a_step_after_a_late_one() -> None:
    import torch
    import torch.distributed as dist

    from polytrain_torch.collectives.node_group import gradient_group

    group = gradient_group(torch.device("cpu"))
    sums = [torch.ones(2) for _ in range(2)]
    if dist.get_rank() == 0:
        work = [dist.all_reduce(each, group=group, async_op=True) for each in sums]
        dist.barrier()
        for each in work:
            each.wait()
    else:
        dist.barrier()  # Rank 0 comes here although rank 1 hasn't added up anything
        for each in sums:
            dist.all_reduce(each, group=group)
    assert [each.tolist() for each in sums] == [[2.0, 2.0]] * 2
    if dist.get_rank() == 0:
        group._sums._timeout_s = 1
        dist.all_reduce(torch.ones(1), group=group)


def test_late_sums_are_made_in_order_and_one_that_fails_is_reported(tmp_path: Path) -> None:
    world = run_world(
        Torch(timeout_s=60),
        data=DATA,
        path=tmp_path,
        training_function=lacks_a_step_after_a_late_one,
    )
    failed = world.ranks[0].failure
    assert failed is not None
    assert "rank 0 has waited 1 s for rank 1 to add up gradients" in failed.failure.message
