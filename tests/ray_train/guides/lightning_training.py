"""Lightning inside TorchTrainer, with Ray Train's strategy, environment and callback."""

import json
import os

import lightning.pytorch as pl
import ray.train.lightning
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch.utils.data import DataLoader, TensorDataset


class Line(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, index):
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.layer(x), y)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def train_func():
    pl.seed_everything(0)
    x = torch.arange(32.0)[:, None] / 32
    loader = DataLoader(TensorDataset(x, 2 * x), batch_size=4)
    trainer = pl.Trainer(
        max_epochs=2,
        devices="auto",
        accelerator="cpu",
        strategy=ray.train.lightning.RayDDPStrategy(),
        plugins=[ray.train.lightning.RayLightningEnvironment()],
        callbacks=[ray.train.lightning.RayTrainReportCallback()],
        enable_checkpointing=False,
        enable_progress_bar=False,
        logger=False,
    )
    trainer = ray.train.lightning.prepare_trainer(trainer)
    trainer.fit(Line(), train_dataloaders=loader)


trainer = TorchTrainer(
    train_func,
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(name="lightning", storage_path=os.path.join(os.getcwd(), "storage")),
)
result = trainer.fit()
with result.checkpoint.as_directory() as directory:
    state = torch.load(os.path.join(directory, "checkpoint.ckpt"), weights_only=False)
print("RESULT", json.dumps({**result.metrics, "epoch_saved": state["epoch"]}))
