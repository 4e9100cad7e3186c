"""Accelerate inside TorchTrainer."""

import json
import os
import tempfile

import ray.train
import torch
from accelerate import Accelerator
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch.utils.data import DataLoader, TensorDataset


def train_func():
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    x = torch.arange(32.0)[:, None] / 32
    loader = DataLoader(TensorDataset(x, 2 * x), batch_size=4)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(2):
        for inputs, targets in loader:
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
        with tempfile.TemporaryDirectory() as directory:
            checkpoint = None
            plain = accelerator.unwrap_model(model)
            if accelerator.is_main_process:
                torch.save(plain.state_dict(), os.path.join(directory, "model.pt"))
                checkpoint = Checkpoint.from_directory(directory)
            metrics = {"epoch": epoch, "bias": plain.bias.item()}
            ray.train.report(metrics, checkpoint=checkpoint)


trainer = TorchTrainer(
    train_func,
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(name="accelerate", storage_path=os.path.join(os.getcwd(), "storage")),
)
print("RESULT", json.dumps(trainer.fit().metrics))
