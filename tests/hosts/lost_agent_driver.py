"""Trains on two hosts, one of which is to be lost with all that is on it."""

from __future__ import annotations

import json
import sys
from typing import Any

STEPS, BATCH = 12, 8


def train(config: dict[str, Any]) -> None:
    """The rank of `config["rank"]` stands still before a step of the first attempt."""
    import time
    from pathlib import Path

    import torch
    from torch.utils.data import DataLoader, TensorDataset

    import polytrain
    import polytrain_torch

    torch.manual_seed(0)
    inner = torch.nn.Sequential(
        torch.nn.Linear(3, 17), torch.nn.BatchNorm1d(17), torch.nn.Dropout(0.3)
    )
    inner = torch.nn.Sequential(inner, torch.nn.Linear(17, 1))
    model = polytrain_torch.prepare_model(inner, parallel_strategy=config["strategy"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x = torch.arange(3.0 * 2 * BATCH * STEPS).reshape(-1, 3) / 500
    loader = polytrain_torch.prepare_data_loader(
        DataLoader(TensorDataset(x, x.sum(1)), batch_size=BATCH, shuffle=True)
    )
    context = polytrain.get_context()
    # Each rank draws other numbers.
    polytrain_torch.seed_everything(7)
    state = polytrain_torch.TrainingState(model=model, optimizer=optimizer)
    done = state.restore()

    class Steps:
        """Counts what this attempt does; nothing that trains reads it."""

        begun = 0

    directory, rank = Path(config["directory"]), context.get_world_rank()

    def begin() -> None:
        Steps.begun += 1
        with (directory / f"steps of {rank}").open("a") as file:
            file.write(f"{context.get_attempt()}\n")
        is_last = context.get_attempt() == 0 and Steps.begun == config["step"]
        if is_last and rank == config["rank"]:
            (directory / "stands").touch()
            while True:
                time.sleep(1)

    for epoch in range(done.get("epoch", 0), 1):
        for x, y in loader:
            begin()
            optimizer.zero_grad()
            (model(x)[:, 0] - y).square().mean().backward()
            optimizer.step()
        state.report({"epoch": epoch}, epoch=epoch + 1)


def fit(config: dict[str, Any], **changes: Any) -> Any:
    from polytrain import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig, make_trainer

    return make_trainer(
        "torch",
        train,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=2, **changes),
        run_config=RunConfig(
            storage_path=config["directory"],
            name="run",
            progress=False,
            # A rank stands still while Ray starts on another host.
            failure_config=FailureConfig(max_failures=1, hang_timeout_s=None),
            checkpoint_config=CheckpointConfig(
                memory=config["memory"], written_by=config["written_by"]
            ),
        ),
    ).fit()


if __name__ == "__main__":
    result = fit(json.loads(sys.argv[1]), placement_strategy="STRICT_SPREAD")
    print("finished", result.finished, "restarts", result.restarts)
