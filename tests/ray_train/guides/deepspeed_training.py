"""DeepSpeed's ZeRO inside TorchTrainer; every worker writes its part of the checkpoint."""

import json
import os
import tempfile

import deepspeed
import ray.train
import ray.train.torch
import torch
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch.utils.data import DataLoader, TensorDataset


def train_func(config):
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    engine, _, _, _ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        config=config["deepspeed"],
    )
    x = torch.arange(32.0)[:, None] / 32
    loader = ray.train.torch.prepare_data_loader(DataLoader(TensorDataset(x, 2 * x), batch_size=4))
    for epoch in range(2):
        for inputs, targets in loader:
            loss = torch.nn.functional.mse_loss(engine(inputs), targets)
            engine.backward(loss)
            engine.step()
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        with tempfile.TemporaryDirectory() as directory:
            engine.save_checkpoint(directory)
            torch.distributed.barrier()
            metrics = {"epoch": epoch, "loss": total.item() / 2}
            ray.train.report(metrics, checkpoint=Checkpoint.from_directory(directory))


trainer = TorchTrainer(
    train_func,
    train_loop_config={
        "deepspeed": {
            "train_micro_batch_size_per_gpu": 4,
            "zero_optimization": {"stage": 2},
            "zero_allow_untested_optimizer": True,
        }
    },
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(name="deepspeed", storage_path=os.path.join(os.getcwd(), "storage")),
)
result = trainer.fit()
with result.checkpoint.as_directory() as directory:
    names = sorted(
        name for _, _, files in os.walk(directory) for name in files if "optim_states" in name
    )
print("RESULT", json.dumps({**result.metrics, "optimizers": names}))
