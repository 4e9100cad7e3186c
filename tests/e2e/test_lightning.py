"""Lightning's `Trainer`, killed and gone on with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.e2e import torch_runs
from tests.e2e.torch_runs import equal

from polytrain import (
    CheckpointConfig,
    Result,
    RunConfig,
)


def train(config: dict[str, Any]) -> None:
    import os
    import signal

    import lightning
    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch.utils.data import DataLoader, TensorDataset

    import polytrain
    from polytrain_torch.lightning import Trainer

    class Regression(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(
                torch.nn.Linear(3, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1)
            )

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            context = polytrain.get_context()
            dies = context.get_world_rank() == 1 and context.get_attempt() == 0
            if dies and self.global_step == config["dies_after"]:
                os.kill(os.getpid(), signal.SIGKILL)
            x, y = batch
            loss = (self.layers(x)[:, 0] - y).square().mean()
            self.log("loss", loss, sync_dist=True)
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            x, y = batch
            self.log("error", (self.layers(x)[:, 0] - y).abs().mean(), sync_dist=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    lightning.seed_everything(1, verbose=False)
    x = torch.arange(144.0).reshape(48, 3) / 144
    rows = TensorDataset(x, x.sum(1))
    trainer = Trainer(
        max_epochs=3,
        default_root_dir=config["output"],
        callbacks=[ModelCheckpoint(every_n_train_steps=4)],
        logger=False,
        enable_model_summary=False,
    )
    trainer.fit(
        Regression(), DataLoader(rows, batch_size=4, shuffle=True), DataLoader(rows, batch_size=8)
    )


def fit(quiet: RunConfig, output: Path, *, dies_after: int = -1, **changes: Any) -> Result:
    config = {"output": str(output), "dies_after": dies_after}
    return torch_runs.fit(quiet, train, config, **changes)


def weights(result: Result) -> dict[str, torch.Tensor]:
    assert result.checkpoint is not None
    file = Path(result.checkpoint.path, "lightning.ckpt")
    state: dict[str, torch.Tensor] = torch.load(file, weights_only=True)["state_dict"]
    return state


@pytest.mark.parametrize("written_by", ["rank_0", "every_rank"])
def test_a_killed_run_ends_in_the_same_weights(
    quiet: RunConfig, tmp_path: Path, written_by: Any
) -> None:
    """It dies in the middle of an epoch, behind a checkpoint."""
    config = CheckpointConfig(written_by=written_by)
    undisturbed = fit(quiet, tmp_path / "undisturbed", checkpoint_config=config)
    killed = fit(quiet, tmp_path / "killed", dies_after=10, checkpoint_config=config)
    assert killed.restarts == 1
    assert equal(weights(killed), weights(undisturbed))
    assert [report["step"] for report in killed.history] == [4, 6, 8, 12, 16, 18]


def test_one_worker_is_enough(quiet: RunConfig, tmp_path: Path) -> None:
    result = fit(quiet, tmp_path, workers=1)
    assert result.metrics["step"] == 3 * 12
    assert all(each.isfinite().all() for each in weights(result).values())
