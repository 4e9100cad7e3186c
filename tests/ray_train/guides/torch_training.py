"""A network on torch: data loaders split by rank, a checkpoint an epoch, one failure on the way."""

import json
import os
import tempfile

import ray.train
import ray.train.torch
import torch
from ray.train import Checkpoint, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch.utils.data import DataLoader, TensorDataset

FLAG = os.path.join(os.getcwd(), "failed")


def train_func(config):
    torch.manual_seed(0)
    model = ray.train.torch.prepare_model(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    x = torch.arange(256.0).reshape(64, 4) / 256
    loader = ray.train.torch.prepare_data_loader(
        DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
    )
    start = 0
    checkpoint = ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as directory:
            state = torch.load(os.path.join(directory, "state.pt"))
            model.module.load_state_dict(state["model"])
            start = state["epoch"] + 1
    for epoch in range(start, config["epochs"]):
        is_rank_1 = ray.train.get_context().get_world_rank() == 1
        if epoch == 2 and is_rank_1 and not os.path.exists(FLAG):
            open(FLAG, "w").close()
            raise RuntimeError("a worker fails once")
        for inputs, targets in loader:
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        metrics = {"epoch": epoch, "bias": model.module.bias.item()}
        with tempfile.TemporaryDirectory() as directory:
            checkpoint = None
            if ray.train.get_context().get_world_rank() == 0:
                state = {"model": model.module.state_dict(), "epoch": epoch}
                torch.save(state, os.path.join(directory, "state.pt"))
                checkpoint = Checkpoint.from_directory(directory)
            ray.train.report(metrics, checkpoint=checkpoint)


trainer = TorchTrainer(
    train_func,
    train_loop_config={"lr": 0.1, "epochs": 4},
    scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
    run_config=RunConfig(
        name="torch-training",
        storage_path=os.path.join(os.getcwd(), "storage"),
        failure_config=FailureConfig(max_failures=2),
        checkpoint_config=CheckpointConfig(num_to_keep=2),
    ),
)
result = trainer.fit()
with result.checkpoint.as_directory() as directory:
    weight = torch.load(os.path.join(directory, "state.pt"))["model"]["weight"]
print("RESULT", json.dumps({**result.metrics, "weight": weight.flatten().tolist()}))
