"""A network on torch over a data set of Ray Data, with a preprocessing step."""

import json
import os
import tempfile

import ray
import ray.train.torch
import torch
from ray import train
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def normalize(batch):
    return {"x": (batch["x"] / 100).astype("float32"), "y": (batch["y"] / 100).astype("float32")}


def train_func():
    torch.manual_seed(0)
    model = train.torch.prepare_model(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shard = train.get_dataset_shard("train")
    for epoch in range(2):
        rows = 0
        for batch in shard.iter_torch_batches(batch_size=10, dtypes=torch.float):
            loss = torch.nn.functional.mse_loss(model(batch["x"][:, None]), batch["y"][:, None])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            rows += len(batch["x"])
        with tempfile.TemporaryDirectory() as directory:
            # Every rank saves the file, each with the loss of its own last batch.
            state = {"model": model.state_dict(), "loss": loss.item()}
            torch.save(state, os.path.join(directory, "model.pt"))
            metrics = {"epoch": epoch, "rows": rows}
            train.report(metrics, checkpoint=train.Checkpoint.from_directory(directory))


# Tasks of Ray Data run beside the workers.
ray.init(num_cpus=4)
dataset = ray.data.from_items([{"x": float(i), "y": 2.0 * i} for i in range(100)])
trainer = TorchTrainer(
    train_func,
    datasets={"train": dataset.map_batches(normalize)},
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(storage_path=os.path.join(os.getcwd(), "storage"), name="ray-data"),
)
print("RESULT", json.dumps(trainer.fit().metrics))
