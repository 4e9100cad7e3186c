"""With virtual workers, a GPU computes the same bits whatever joins the ranks, and how many."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from polytrain import FailureConfig, Result, RunConfig, ScalingConfig, make_trainer

ROWS, EPOCHS, KILLED_AT = 25, 2, 9


def train(config: dict[str, Any]) -> None:
    """The last rank dies once, after a step and before it reports it."""
    import torch

    from polytrain import get_context, get_dataset_shard
    from polytrain.torch import TrainingState, get_device, micro_batches, prepare_model

    context = get_context()
    device = get_device()
    torch.manual_seed(1)
    model = prepare_model(
        torch.nn.Sequential(
            torch.nn.Conv1d(1, 8, 3),
            torch.nn.BatchNorm1d(8),
            torch.nn.ReLU(),
            torch.nn.Flatten(),
            torch.nn.Dropout(0.2),
            torch.nn.Linear(80, 1),
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**20, growth_interval=3)
    state = TrainingState(model=model, optimizer=optimizer, scaler=scaler)
    done = state.restore()
    dies = (
        config["dies"]
        and context.get_attempt() == 0
        and context.get_world_rank() == context.get_world_size() - 1
    )
    step = done.get("step", 0)
    for epoch in range(done.get("epoch", 0), EPOCHS):
        for batch in get_dataset_shard().iter_torch_batches(
            global_batch_size=16, dtypes=torch.float32
        ):
            step += 1
            optimizer.zero_grad()
            for part in micro_batches(batch):
                with torch.autocast(device.type, torch.float16):
                    predicted = model(part["x"][:, None])[:, 0]
                    loss = torch.nn.functional.mse_loss(predicted, part["y"])
                scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            if dies and step == KILLED_AT:
                os.kill(os.getpid(), signal.SIGKILL)
            state.report(
                {
                    "loss": loss.item(),
                    "scale": scaler.get_scale(),
                    "draw": torch.rand((), device=device).item(),
                    "device": device.type,
                },
                step=step,
                epoch=epoch,
            )


def fit(path: Path, workers: int, group: str, *, dies: bool) -> Result:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((16 * ROWS - 7, 12), dtype=np.float32)
    return make_trainer(
        "torch",
        train,
        train_loop_config={"dies": dies},
        process_group=group,
        datasets={"train": {"x": list(x), "y": x.sum(1)}},
        scaling_config=ScalingConfig(
            num_workers=workers, virtual_workers=4, use_gpu=True, cluster="local"
        ),
        run_config=RunConfig(
            storage_path=path,
            name="run",
            progress=False,
            failure_config=FailureConfig(max_failures=1),
        ),
    ).fit()


def digest(result: Result) -> str:
    """A hash of the reports and of the weights."""
    found = hashlib.sha256()
    for report in result.history:
        found.update(repr([report[name] for name in ("loss", "scale", "draw")]).encode())
    for name, value in sorted(result.load_model().items()):
        found.update(name.encode() + value.numpy().tobytes())
    return found.hexdigest()


def test_nccl_and_gloo_end_in_one_hash(
    tmp_path: Path, share_gpu: Callable[[int], None], figure: Callable[[str, str], None]
) -> None:
    digests = {}
    for name, workers, group, dies in (
        ("NCCL, 1 process", 1, "nccl", False),
        ("gloo, 1 process", 1, "gloo", False),
        ("gloo, 2 processes", 2, "gloo", False),
        ("gloo, 3 processes, one killed", 3, "gloo", True),
        ("NCCL, 1 process, killed", 1, "nccl", True),
    ):
        share_gpu(workers)
        result = fit(tmp_path / name, workers, group, dies=dies)
        assert {each["device"] for each in result.history} == {"cuda"}
        assert len(result.history) == EPOCHS * ROWS
        digests[name] = digest(result)
    figure("virtual workers, digests", ", ".join(sorted({d[:12] for d in digests.values()})))
    assert len(set(digests.values())) == 1, digests
