"""A script for Ray Train, of which only the imports were changed: a worker fails once.

pip install '.[torch]'
python examples/ported_from_ray_train.py
"""

from __future__ import annotations

import os
import tempfile

import torch
from torch.utils.data import DataLoader, TensorDataset

# The only changes. Above each new line stands the one that it replaces.
# from ray import train
import polytrain as train

# from ray.train import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from polytrain import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig

# from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from polytrain.torch import TorchTrainer, prepare_data_loader, prepare_model


def train_func(config):
    torch.manual_seed(0)
    model = prepare_model(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    x = torch.randn(256, 4)
    loader = prepare_data_loader(DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8))

    start = 0
    checkpoint = train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as directory:
            state = torch.load(os.path.join(directory, "state.pt"))
        model.module.load_state_dict(state["model"])
        start = state["epoch"] + 1
        if train.get_context().get_world_rank() == 0:
            print(f"resumes with epoch {start}", flush=True)

    for epoch in range(start, config["epochs"]):
        if epoch == 3 and start == 0 and train.get_context().get_world_rank() == 1:
            raise RuntimeError("this worker fails once")
        for inputs, targets in loader:
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with tempfile.TemporaryDirectory() as directory:
            checkpoint = None
            if train.get_context().get_world_rank() == 0:
                state = {"model": model.module.state_dict(), "epoch": epoch}
                torch.save(state, os.path.join(directory, "state.pt"))
                checkpoint = Checkpoint.from_directory(directory)
            train.report({"epoch": epoch, "loss": loss.item()}, checkpoint=checkpoint)


def main():
    with tempfile.TemporaryDirectory() as storage:
        trainer = TorchTrainer(
            train_func,
            train_loop_config={"lr": 0.05, "epochs": 6},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(
                name="ported",
                storage_path=storage,
                failure_config=FailureConfig(max_failures=1),
                checkpoint_config=CheckpointConfig(num_to_keep=2),
            ),
        )
        result = trainer.fit()
        with result.checkpoint.as_directory() as directory:
            weights = torch.load(os.path.join(directory, "state.pt"))["model"]["weight"]
    print(f"epoch {result.metrics['epoch']}, loss {result.metrics['loss']:.4f}")
    print("weights:", [round(weight, 2) for weight in weights[0].tolist()])


if __name__ == "__main__":
    main()
