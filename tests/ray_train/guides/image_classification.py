"""A convolutional network on images: sampler, schedule, best checkpoint and callback."""

import json
import os
import tempfile
from pathlib import Path

import ray.train.torch
import torch
from ray import train
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SEEN = Path("seen.txt").absolute()


def images(count, seed):
    """Pictures with a bright square in one of four corners, which is what there is to learn."""
    generator = torch.Generator().manual_seed(seed)
    pictures = torch.rand(count, 1, 8, 8, generator=generator) * 0.5
    corners = torch.arange(count) % 4
    for picture, corner in zip(pictures, corners, strict=True):
        top, left = 4 * (corner // 2), 4 * (corner % 2)
        picture[0, top : top + 4, left : left + 4] += 0.5
    return TensorDataset(pictures, corners)


def network():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 4)
    )


def train_func_per_worker(config):
    ray.train.torch.enable_reproducibility(seed=1)
    batch_size = config["global_batch_size"] // train.get_context().get_world_size()
    train_loader = DataLoader(images(128, 0), batch_size=batch_size, shuffle=True)
    test_loader = DataLoader(images(32, 1), batch_size=batch_size)
    train_loader = train.torch.prepare_data_loader(train_loader)
    test_loader = train.torch.prepare_data_loader(test_loader)
    model = train.torch.prepare_model(network())
    assert next(model.parameters()).device == train.torch.get_device()
    loss_fn = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    for epoch in range(config["epochs"]):
        if train.get_context().get_world_size() > 1:
            train_loader.sampler.set_epoch(epoch)
        model.train()
        for x, y in train_loader:
            loss = loss_fn(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step()
        model.eval()
        total, correct = 0.0, 0
        with torch.no_grad():
            for x, y in test_loader:
                predicted = model(x)
                total += loss_fn(predicted, y).item()
                correct += (predicted.argmax(1) == y).sum().item()
        metrics = {"loss": total / len(test_loader), "correct": correct, "epoch": epoch}
        with tempfile.TemporaryDirectory() as directory:
            checkpoint = None
            if train.get_context().get_world_rank() == 0:
                torch.save(model.module.state_dict(), os.path.join(directory, "model.pt"))
                checkpoint = train.Checkpoint.from_directory(directory)
                checkpoint.set_metadata({"epoch": epoch})
            train.report(metrics, checkpoint=checkpoint)


class Notes(train.UserCallback):
    def after_report(self, run_context, metrics, checkpoint):
        with SEEN.open("a") as file:
            file.write(f"{run_context.run_config.name} {len(metrics)} {checkpoint is not None}\n")


trainer = ray.train.torch.TorchTrainer(
    train_loop_per_worker=train_func_per_worker,
    train_loop_config={"lr": 0.1, "epochs": 3, "global_batch_size": 32},
    scaling_config=train.ScalingConfig(num_workers=2, use_gpu=False),
    run_config=train.RunConfig(
        name="images",
        storage_path=os.path.abspath("storage"),
        callbacks=[Notes()],
        checkpoint_config=train.CheckpointConfig(
            num_to_keep=2, checkpoint_score_attribute="loss", checkpoint_score_order="min"
        ),
    ),
)
result = trainer.fit()
best = result.get_best_checkpoint(metric="loss", mode="min")
with best.as_directory() as directory:
    model = network()
    model.load_state_dict(torch.load(os.path.join(directory, "model.pt")))
pictures, corners = images(16, 2).tensors
summary = {
    "epoch": result.metrics["epoch"],
    "correct": result.metrics["correct"],
    "best": best.get_metadata()["epoch"],
    "kept": sorted(metrics["epoch"] for _, metrics in result.best_checkpoints),
    "right": (model(pictures).argmax(1) == corners).sum().item(),
    "seen": SEEN.read_text().splitlines(),
}
print("RESULT", json.dumps(summary))
