"""Handwritten digits by PyTorch Lightning: two workers, one of which is killed on the way.

pip install '.[lightning]' scikit-learn
python examples/lightning_digits.py
"""

from __future__ import annotations

from pathlib import Path

from digits import EPOCHS, digits, kill_a_worker, print_result

from polytrain import FailureConfig, RunConfig, ScalingConfig, make_trainer


def module():
    import lightning
    import torch

    class Digits(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.Sequential(
                torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Dropout(0.1)
            )
            self.head = torch.nn.Linear(64, 10)

        def forward(self, images):
            return self.head(self.layers(images))

        def on_train_epoch_start(self):
            kill_a_worker(self.current_epoch)

        def training_step(self, batch, index):
            images, shown = batch
            loss = torch.nn.functional.cross_entropy(self(images), shown)
            self.log_dict({"loss": loss, "workers": float(self.trainer.world_size)})
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=3e-3)

    return Digits()


def train():
    import lightning
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from polytrain_torch.lightning import Trainer  # instead of lightning.Trainer

    lightning.seed_everything(0, verbose=False)
    (images, shown), _ = digits()
    rows = TensorDataset(torch.from_numpy(images), torch.from_numpy(shown))
    loader = DataLoader(rows, batch_size=16, shuffle=True)
    trainer = Trainer(max_epochs=EPOCHS, logger=False, enable_model_summary=False)
    trainer.fit(module(), loader)


def main():
    import torch

    result = make_trainer(
        "torch",
        train,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=1)),
    ).fit()
    saved = torch.load(Path(result.checkpoint.path, "lightning.ckpt"), weights_only=True)
    model = module().eval()
    model.load_state_dict(saved["state_dict"])
    _, (images, _) = digits()
    print_result(result, model(torch.from_numpy(images)).argmax(1).numpy())


if __name__ == "__main__":
    main()
