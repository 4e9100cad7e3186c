"""Calls of Horovod's interface, and what plain torch in one process makes of all ranks' inputs.

`CALLS` use nothing but Horovod's documented interface, so that they can be run with Horovod itself.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch

Call = Callable[[Any], Any]
Expected = Callable[[int, int], Any]
"""Of a rank and the number of ranks."""


def of(rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(6).reshape(3, 2) + 10 * rank + 1).to(dtype)


def all_of(size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.stack([of(rank, dtype) for rank in range(size)])


def rows_of(rank: int) -> torch.Tensor:
    """A number of rows that differs: 1 on rank 0."""
    return torch.full((rank + 1, 2), float(rank))


def _gradient(call: Callable[[torch.Tensor], torch.Tensor], rank: int) -> torch.Tensor:
    """The gradient of a weighted sum of what a call returns."""
    given = of(rank).requires_grad_()
    out = call(given)
    (out * (torch.arange(out.numel()).reshape(out.shape) + rank)).sum().backward()
    assert given.grad is not None
    return given.grad


def _weights(shape: tuple[int, ...], rank: int) -> torch.Tensor:
    return (torch.arange(math.prod(shape)).reshape(shape) + rank).float()


def _in_place(hvd: Any) -> Any:
    tensor = of(hvd.rank())
    out = hvd.allreduce_(tensor, op=hvd.Sum)
    return [out, tensor]


def _async(hvd: Any) -> Any:
    tensor = of(hvd.rank())
    first = hvd.allreduce_async(tensor, op=hvd.Sum)
    second = hvd.allreduce_async_(tensor.clone(), op=hvd.Average)
    results = [hvd.synchronize(second), hvd.synchronize(first)]
    return [*results, hvd.poll(hvd.allreduce_async(tensor)) in (True, False)]


def _legacy(hvd: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [hvd.allreduce(of(hvd.rank()), average=flag) for flag in (True, False)]


def _broadcast_in_place(hvd: Any) -> Any:
    tensor = of(hvd.rank())
    hvd.broadcast_(tensor, root_rank=1)
    return tensor


def _parameters(hvd: Any) -> Any:
    torch.manual_seed(hvd.rank())
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    hvd.broadcast_parameters(model.state_dict(), root_rank=1)
    return [model.state_dict()[name] for name in sorted(model.state_dict())]


def _parameters_of_1() -> Any:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    return [model.state_dict()[name] for name in sorted(model.state_dict())]


def _optimizer_state(hvd: Any) -> Any:
    """Rank 0 has trained; the others' optimizers are new."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([weight], lr=0.1 * (hvd.rank() + 1))
    if hvd.rank() == 0:
        weight.grad = torch.tensor([1.0, 2.0])
        optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    [state] = optimizer.state_dict()["state"].values()
    return [optimizer.param_groups[0]["lr"], state["exp_avg"], float(state["step"])]


def _splits(hvd: Any) -> Any:
    """Each rank sends rank r as many rows as r + 1."""
    size = hvd.size()
    splits = torch.arange(1, size + 1, dtype=torch.int32)
    tensor = torch.full((int(splits.sum()), 2), float(hvd.rank()))
    output, received = hvd.alltoall(tensor, splits=splits)
    return [output, received.long()]


CALLS: dict[str, tuple[Call, Expected]] = {
    "allreduce": (lambda hvd: hvd.allreduce(of(hvd.rank())), lambda _, n: all_of(n).mean(0)),
    "allreduce-sum": (
        lambda hvd: hvd.allreduce(of(hvd.rank()), op=hvd.Sum, name="x"),
        lambda _, n: all_of(n).sum(0),
    ),
    "allreduce-min": (
        lambda hvd: hvd.allreduce(of(hvd.rank()), op=hvd.Min),
        lambda _, n: all_of(n).amin(0),
    ),
    "allreduce-max": (
        lambda hvd: hvd.allreduce(of(hvd.rank()), op=hvd.Max),
        lambda _, n: all_of(n).amax(0),
    ),
    "allreduce-product": (
        lambda hvd: hvd.allreduce(of(hvd.rank()), op=hvd.Product),
        lambda _, n: all_of(n).prod(0),
    ),
    "allreduce-scaled": (
        lambda hvd: hvd.allreduce(of(hvd.rank()), prescale_factor=0.5, postscale_factor=4.0),
        lambda _, n: all_of(n).mean(0) * 2,
    ),
    "allreduce-whole-numbers": (
        # The sum of these can't be divided by 2 or 3 ranks.
        lambda hvd: hvd.allreduce(torch.tensor([hvd.rank(), 5 + hvd.rank()]), op=hvd.Average),
        lambda _, n: torch.tensor(
            [int(sum(range(n)) / n), int((5 * n + sum(range(n))) / n)], dtype=torch.int64
        ),
    ),
    "allreduce-double": (
        lambda hvd: hvd.allreduce(of(hvd.rank(), torch.float64)),
        lambda _, n: all_of(n, torch.float64).mean(0),
    ),
    "allreduce-half": (
        lambda hvd: hvd.allreduce(of(hvd.rank(), torch.float16), op=hvd.Sum),
        lambda _, n: all_of(n, torch.float16).sum(0),
    ),
    "allreduce-fp16": (
        lambda hvd: hvd.allreduce(of(hvd.rank()), compression=hvd.Compression.fp16),
        lambda _, n: all_of(n).half().mean(0).float(),
    ),
    "allreduce-in-place": (_in_place, lambda _, n: [all_of(n).sum(0)] * 2),
    "allreduce-async": (_async, lambda _, n: [all_of(n).mean(0), all_of(n).sum(0), True]),
    "allreduce-average": (_legacy, lambda _, n: [all_of(n).mean(0), all_of(n).sum(0)]),
    "allreduce-gradient": (
        lambda hvd: _gradient(lambda given: hvd.allreduce(given, op=hvd.Sum), hvd.rank()),
        lambda _, n: sum(_weights((3, 2), rank) for rank in range(n)),
    ),
    "grouped-allreduce": (
        lambda hvd: list(hvd.grouped_allreduce([of(hvd.rank()), torch.ones(2)])),
        lambda _, n: [all_of(n).mean(0), torch.ones(2)],
    ),
    "allgather": (
        lambda hvd: hvd.allgather(of(hvd.rank())),
        lambda _, n: all_of(n).flatten(0, 1),
    ),
    "allgather-ragged": (
        lambda hvd: hvd.allgather(rows_of(hvd.rank())),
        lambda _, n: torch.cat([rows_of(rank) for rank in range(n)]),
    ),
    "allgather-gradient": (
        lambda hvd: _gradient(hvd.allgather, hvd.rank()),
        lambda rank, n: torch.stack([_weights((3 * n, 2), other) for other in range(n)]).mean(0)[
            3 * rank : 3 * rank + 3
        ],
    ),
    "broadcast": (lambda hvd: hvd.broadcast(of(hvd.rank()), 1), lambda _, n: of(1)),
    "broadcast-in-place": (_broadcast_in_place, lambda _, n: of(1)),
    "broadcast-gradient": (
        lambda hvd: _gradient(lambda given: hvd.broadcast(given, 1), hvd.rank()),
        lambda rank, n: (
            torch.stack([_weights((3, 2), other) for other in range(n)]).mean(0)
            * (1.0 if rank == 1 else 0.0)
        ),
    ),
    "broadcast-object": (
        lambda hvd: hvd.broadcast_object({"rank": hvd.rank()}, root_rank=1),
        lambda _, n: {"rank": 1},
    ),
    "allgather-object": (
        lambda hvd: hvd.allgather_object({"rank": hvd.rank()}),
        lambda _, n: [{"rank": rank} for rank in range(n)],
    ),
    "alltoall": (
        lambda hvd: hvd.alltoall(torch.arange(2.0 * hvd.size()) + 100 * hvd.rank()),
        lambda rank, n: torch.cat(
            [torch.arange(2.0) + 2 * rank + 100 * other for other in range(n)]
        ),
    ),
    "alltoall-splits": (
        _splits,
        lambda rank, n: [
            torch.cat([torch.full((rank + 1, 2), float(other)) for other in range(n)]),
            torch.full((n,), rank + 1),
        ],
    ),
    "reducescatter": (
        lambda hvd: hvd.reducescatter(of(hvd.rank())),
        lambda rank, n: all_of(n).mean(0).tensor_split(n)[rank],
    ),
    "reducescatter-sum": (
        lambda hvd: hvd.reducescatter(of(hvd.rank()), op=hvd.Sum),
        lambda rank, n: all_of(n).sum(0).tensor_split(n)[rank],
    ),
    "broadcast-parameters": (_parameters, lambda _, n: _parameters_of_1()),
    "broadcast-optimizer-state": (
        _optimizer_state,
        lambda _, n: [0.1, torch.tensor([0.1, 0.2]), 1.0],
    ),
    "places": (
        lambda hvd: [hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.is_initialized()],
        lambda rank, n: [n, rank, n, True],
    ),
    "nodes": (lambda hvd: [hvd.cross_rank(), hvd.cross_size()], lambda _, n: [0, 1]),
    "barrier": (lambda hvd: hvd.barrier(), lambda _, n: None),
}


def plain(value: Any) -> Any:
    """A value as JSON has it."""
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), value.tolist()]
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value


# ---- training

STEPS = 4


def model(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(5, 3, generator=generator)
    return x, x.sum(1, keepdim=True)


def loss_of(net: torch.nn.Module, step: int, rank: int) -> torch.Tensor:
    x, y = batch(step, rank)
    return torch.nn.functional.mse_loss(net(x), y)


def weights(net: torch.nn.Module) -> list[float]:
    return torch.cat([each.detach().reshape(-1) for each in net.parameters()]).tolist()


def trained(hvd: Any, options: dict[str, Any], *, clip: bool = False, passes: int = 1) -> Any:
    """The weights after some steps with a `DistributedOptimizer`."""
    net = model(hvd.rank())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=net.named_parameters(), **options
    )
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for step in range(STEPS):
        optimizer.zero_grad()
        for one in range(passes):
            loss_of(net, passes * step + one, hvd.rank()).backward()
        if clip:
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
    return weights(net)


def trained_alone(
    size: int,
    *,
    factor: float = 1.0,
    clip: bool = False,
    passes: int = 1,
    steps: int = STEPS,
    shares: Callable[[int], range] | None = None,
) -> list[float]:
    """The same in one process, from the rows of all ranks.

    Args:
        size: number of ranks.
        factor: of the averaged gradients.
        clip: whether they are clipped.
        passes: batches of a step, whose gradients are added up.
        steps: how many.
        shares: which ranks have a batch in a step; all by default.
    """
    net = model(0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        for one in range(passes):
            for rank in range(size) if shares is None else shares(step):
                (loss_of(net, passes * step + one, rank) * factor / size).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
    return weights(net)


TRAININGS: dict[str, tuple[Call, Callable[[int], list[float]]]] = {
    "average": (lambda hvd: trained(hvd, {}), trained_alone),
    "sum": (
        lambda hvd: trained(hvd, {"op": hvd.Sum}),
        lambda n: trained_alone(n, factor=n),
    ),
    "predivide": (lambda hvd: trained(hvd, {"gradient_predivide_factor": 2.0}), trained_alone),
    "passes": (
        lambda hvd: trained(hvd, {"backward_passes_per_step": 3}, passes=3),
        lambda n: trained_alone(n, passes=3),
    ),
    "clipped": (lambda hvd: trained(hvd, {}, clip=True), lambda n: trained_alone(n, clip=True)),
    "groups": (lambda hvd: trained(hvd, {"groups": 2}), trained_alone),
}


def joined(hvd: Any) -> Any:
    """Rank r has data for r + 1 steps. Returns which rank joined last, and the weights."""
    net = model(0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=net.named_parameters())
    for step in range(hvd.rank() + 1):
        optimizer.zero_grad()
        loss_of(net, step, hvd.rank()).backward()
        optimizer.step()
        hvd.allreduce(torch.ones(3), name="metric")
    last = hvd.join()
    hvd.broadcast_parameters(net.state_dict(), root_rank=last)
    return [last, weights(net)]


def joined_alone(size: int) -> list[float]:
    """The weights of `joined`, in one process: averages are over all ranks."""
    return trained_alone(size, steps=size, shares=lambda step: range(step, size))
