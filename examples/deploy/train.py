"""The training function of `job.toml`: a small network, and a checkpoint after every epoch."""

from __future__ import annotations

from typing import Any

import numpy as np

from polytrain import get_dataset_shard

_FEATURES = np.random.default_rng(0).normal(size=(2000, 3))
ROWS = {"x": _FEATURES, "y": _FEATURES @ [1.0, -2.0, 0.5]}


def train(config: dict[str, Any]) -> None:
    import torch

    from polytrain_torch import TrainingState, prepare_model

    torch.manual_seed(0)
    model = prepare_model(torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    state = TrainingState(model=model, optimizer=optimizer)
    done = state.restore()
    shard = get_dataset_shard("train")
    for epoch in range(done.get("epoch", 0), config["epochs"]):
        for batch in shard.iter_torch_batches(batch_size=32, dtypes=torch.float32):
            loss = torch.nn.functional.mse_loss(model(batch["x"])[:, 0], batch["y"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        state.report({"loss": loss}, epoch=epoch + 1)
