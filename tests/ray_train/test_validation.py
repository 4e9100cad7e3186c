"""A script that validates with Ray Train runs after a change of its imports."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

import polytrain as train
from polytrain.torch import TorchTrainer

ROWS, SPLIT = 64, 48


def rows(first: int, last: int) -> Any:
    import torch

    x = torch.arange(float(first), float(last))[:, None] / ROWS
    return x, 3 * x + 1


def train_loop(config: dict[str, Any]) -> None:
    import torch

    torch.manual_seed(0)
    model = train.torch.prepare_model(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    rank, size = train.get_context().get_world_rank(), train.get_context().get_world_size()
    x, y = (each[rank::size] for each in rows(0, SPLIT))
    for _ in range(config["epochs"]):
        loss = torch.nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with tempfile.TemporaryDirectory() as directory:
            if rank != 0:
                train.report({"loss": loss.item()})
                continue
            torch.save(model.module.state_dict(), os.path.join(directory, "model.pt"))
            train.report(
                {"loss": loss.item()},
                checkpoint=train.Checkpoint.from_directory(directory),
                validation=train.ValidationTaskConfig(fn_kwargs={"prefix": "val"}),
            )


def validate_fn(checkpoint: train.Checkpoint, prefix: str, threads: int) -> dict[str, Any]:
    import torch

    model = torch.nn.Linear(1, 1)
    with checkpoint.as_directory() as directory:
        model.load_state_dict(torch.load(os.path.join(directory, "model.pt"), weights_only=True))
    x, y = rows(SPLIT, ROWS)
    with torch.no_grad():
        loss = torch.nn.functional.mse_loss(model(x), y)
    # A tensor of one element is a number.
    return {f"{prefix}_loss": loss, "is_bounded": torch.get_num_threads() == threads}


def test_torch(tmp_path: Path) -> None:
    task = train.ValidationTaskConfig(fn_kwargs={"prefix": "x", "threads": 1}, timeout_s=600)
    result = TorchTrainer(
        train_loop,
        train_loop_config={"lr": 0.1, "epochs": 3},
        scaling_config=train.ScalingConfig(num_workers=2),
        run_config=train.RunConfig(
            name="run",
            storage_path=str(tmp_path),
            checkpoint_config=train.CheckpointConfig(
                num_to_keep=1, checkpoint_score_attribute="val_loss", checkpoint_score_order="min"
            ),
        ),
        validation_config=train.ValidationConfig(validate_fn, task_config=task),
    ).fit()
    losses = [metrics["val_loss"] for metrics in result.metrics_dataframe.to_dict("records")]
    assert losses == sorted(losses, reverse=True)
    [(best, metrics)] = result.best_checkpoints
    assert metrics["val_loss"] == min(losses)
    # What the same function returns in this process, which isn't bounded.
    here = validate_fn(best, prefix="val", threads=0)
    assert metrics["val_loss"] == pytest.approx(float(here["val_loss"]), rel=1e-6)
    assert metrics["is_bounded"]
