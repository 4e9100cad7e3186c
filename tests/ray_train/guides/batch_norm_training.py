"""A network with BatchNorm: every rank saves model.pt, and their statistics differ."""

import argparse
import json
import os
import tempfile

import ray.train
import ray.train.torch
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def train_func(config):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 10)
    )
    model = ray.train.torch.prepare_model(model)
    images = torch.randn(96, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    labels = (images.mean((1, 2, 3)) * 40).long().clamp(-5, 4) + 5
    dataset = TensorDataset(images, labels)
    # Each rank normalizes the rows that it has itself: which these are makes a difference.
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=config["batch_size"], sampler=sampler)
    loader = ray.train.torch.prepare_data_loader(loader)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(config["epochs"]):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = nn.functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        metrics = {"loss": loss.item(), "epoch": epoch}
        with tempfile.TemporaryDirectory() as directory:
            torch.save(model.module.state_dict(), os.path.join(directory, "model.pt"))
            ray.train.report(metrics, checkpoint=Checkpoint.from_directory(directory))
        if ray.train.get_context().get_world_rank() == 0:
            print(metrics)


parser = argparse.ArgumentParser()
parser.add_argument("--num-workers", type=int, default=2)
parser.add_argument("--epochs", type=int, default=3)
arguments = parser.parse_args()
trainer = TorchTrainer(
    train_func,
    train_loop_config={"batch_size": 12, "epochs": arguments.epochs},
    scaling_config=ScalingConfig(num_workers=arguments.num_workers, use_gpu=False),
    run_config=RunConfig(
        name="batch-norm",
        storage_path=os.path.join(os.getcwd(), "storage"),
        failure_config=FailureConfig(max_failures=1),
    ),
)
result = trainer.fit()
with result.checkpoint.as_directory() as directory:
    state = torch.load(os.path.join(directory, "model.pt"))
weights = {name: value.sum().item() for name, value in state.items() if value.is_floating_point()}
RESULT = {"metrics": {name: result.metrics[name] for name in ("loss", "epoch")}}
# Ray Train keeps the file of whichever rank writes last: statistics of BatchNorm differ there.
# The gradient of a bias before BatchNorm is rounding alone, which differs by CPU.
RESULT["weights"] = {
    name: each for name, each in weights.items() if "running" not in name and name != "0.bias"
}
print("RESULT", json.dumps(RESULT))
