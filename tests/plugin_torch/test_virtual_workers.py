"""Virtual workers: one number of them, and the same bits at any number of workers."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import polytrain
from polytrain.testing.local_world import run_world
from polytrain_torch import Torch, micro_batches, prepare_data_loader, prepare_model

WORKERS = 4
ROWS = 150
"""Not a multiple of any batch: the last one of an epoch is uneven."""

rng = np.random.default_rng(0)
TABLE = pa.table(
    {
        "x": list(rng.standard_normal((ROWS, 64), dtype=np.float32)),
        "y": rng.integers(0, 10, ROWS),
    }
)


def in_world(function: Callable[[], None], workers: int, path: Path, **options: Any) -> list[Any]:
    """The metrics that rank 0 reports."""
    record = run_world(
        Torch(),
        data=TABLE,
        path=path / str(workers),
        world_size=workers,
        training_function=function,
        **{"virtual_workers": WORKERS, **options},
    )
    failures = [each.failure for each in record.ranks if each.failure is not None]
    assert not failures, failures
    return [report.metrics for report in record.ranks[0].reports]


def digest(*states: Any) -> str:
    """Of all tensors and numbers."""
    total = hashlib.sha256()

    def take(value: Any) -> None:
        if isinstance(value, dict):
            for key in sorted(value, key=str):
                take(value[key])
        elif isinstance(value, list | tuple):
            for each in value:
                take(each)
        elif isinstance(value, torch.Tensor):
            total.update(
                value.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
            )
        else:
            total.update(repr(value).encode())

    take(states)
    return total.hexdigest()


def perceptron() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Dropout(0.3), torch.nn.Linear(32, 10)
    )


def convolutional() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Unflatten(1, (1, 8, 8)),
        torch.nn.Conv2d(1, 8, 3),
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.3),
        torch.nn.Flatten(),
        torch.nn.Linear(8 * 36, 10),
    )


def trains_a_perceptron() -> None:
    """On rows of a shard."""
    torch.manual_seed(1)
    model = prepare_model(perceptron())
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    shard = polytrain.get_dataset_shard()
    for _ in range(2):
        for batch in shard.iter_torch_batches(global_batch_size=32):
            optimizer.zero_grad()
            for part in micro_batches(batch):
                loss = torch.nn.functional.cross_entropy(model(part["x"]), part["y"])
                loss.backward()
            optimizer.step()
            polytrain.report({"loss": loss.item(), "draw": torch.rand(()).item()})
    polytrain.report({"hash": digest(model.state_dict(), optimizer.state_dict())})


class Noisy(Dataset[Any]):
    """Augments with random numbers of all three kinds."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, item: int) -> Any:
        x = torch.as_tensor(np.stack(TABLE["x"].to_numpy())[item])
        noise = torch.rand(64) + np.float32(np.random.rand()) + random.random()
        return x + 0.1 * noise, int(TABLE["y"][item].as_py())


def trains_a_convolutional_net() -> None:
    """With what a real loop has: AMP, clipping, a schedule, and averaged weights."""
    torch.manual_seed(2)
    model = prepare_model(convolutional())
    averaged = torch.optim.swa_utils.AveragedModel(
        model.module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
    )
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    loader = prepare_data_loader(
        DataLoader(Noisy(), batch_size=8, shuffle=True, num_workers=2, drop_last=False)
    )
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=2 * len(loader))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for _ in range(2):
        for batch in loader:
            optimizer.zero_grad()
            for x, y in micro_batches(batch):
                with torch.autocast("cpu", torch.bfloat16):
                    loss = torch.nn.functional.cross_entropy(model(x), y)
                scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            averaged.update_parameters(model.module)
            polytrain.report({"loss": loss.item(), "norm": norm.item()})
    states = (model, averaged, optimizer, scheduler, scaler)
    polytrain.report({"hash": digest(*(each.state_dict() for each in states))})


class Critic(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = torch.nn.Linear(64, 1)
        self.unused = torch.nn.Linear(64, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(torch.nn.functional.dropout(x, 0.2))


def trains_two_models() -> None:
    """A generator and its critic, in turn, each step accumulated over two batches."""
    torch.manual_seed(3)
    generator = prepare_model(torch.nn.Linear(16, 64))
    critic = prepare_model(Critic())
    optimizers = [torch.optim.Adam(each.parameters(), 1e-2) for each in (critic, generator)]
    sampler = DistributedSampler(range(ROWS), shuffle=True)
    data = TensorDataset(torch.as_tensor(np.stack(TABLE["x"].to_numpy())))
    loader = prepare_data_loader(DataLoader(data, batch_size=8, sampler=sampler))
    for number, batch in enumerate(loader):
        for (x,) in micro_batches(batch):
            fake = generator(torch.randn(len(x), 16)).detach()
            loss = critic(fake).mean() - critic(x).mean()
            (loss / 2).backward()
        if number % 2:
            torch.nn.utils.clip_grad_value_(critic.parameters(), 0.1)
            optimizers[0].step()
            optimizers[0].zero_grad()
        for (x,) in micro_batches(batch):
            (-critic(generator(torch.randn(len(x), 16))).mean() / 2).backward()
        critic.zero_grad() if number % 2 else None
        if number % 2:
            optimizers[1].step()
            optimizers[1].zero_grad()
    assert critic.module.unused.weight.grad is None
    states = (generator, critic, *optimizers)
    polytrain.report({"hash": digest(*(each.state_dict() for each in states))})


@pytest.mark.parametrize(
    "function", [trains_a_perceptron, trains_a_convolutional_net, trains_two_models]
)
def test_any_number_of_workers_has_the_same_bits(
    function: Callable[[], None], tmp_path: Path
) -> None:
    reports = {workers: in_world(function, workers, tmp_path) for workers in range(1, WORKERS + 1)}
    assert reports[1][-1]["hash"]
    assert all(each == reports[1] for each in reports.values())
