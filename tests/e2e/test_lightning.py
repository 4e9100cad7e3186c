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
        reload_dataloaders_every_n_epochs=config["reload"],
        logger=False,
        enable_model_summary=False,
    )
    trainer.fit(
        Regression(), DataLoader(rows, batch_size=4, shuffle=True), DataLoader(rows, batch_size=8)
    )


def fit(
    quiet: RunConfig, output: Path, *, dies_after: int = -1, reload: int = 0, **changes: Any
) -> Result:
    config = {"output": str(output), "dies_after": dies_after, "reload": reload}
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


def test_loaders_that_are_made_anew_go_on_in_the_middle_too(
    quiet: RunConfig, tmp_path: Path
) -> None:
    undisturbed = fit(quiet, tmp_path / "undisturbed", reload=1)
    killed = fit(quiet, tmp_path / "killed", dies_after=10, reload=1)
    assert killed.restarts == 1
    assert equal(weights(killed), weights(undisturbed))


def use_what_a_trainer_has(config: dict[str, Any]) -> None:
    import lightning
    import torch
    import torch.distributed as dist
    from lightning.pytorch.callbacks import BasePredictionWriter, TQDMProgressBar
    from torch.utils.data import DataLoader

    import polytrain
    from polytrain_torch.lightning import Trainer

    class Rows(lightning.LightningDataModule):
        def prepare_data(self) -> None:
            with Path(config["output"], "prepared").open("a") as file:
                file.write("once ")

        def train_dataloader(self) -> Any:
            return DataLoader(torch.arange(24.0), batch_size=4, shuffle=True)

        def val_dataloader(self) -> Any:
            return DataLoader(torch.arange(9.0), batch_size=2)

        def predict_dataloader(self) -> Any:
            return DataLoader(torch.arange(25.0), batch_size=4)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            self.seen: list[list[float]] = [[], []]
            self.validated: list[float] = []

        def on_train_start(self) -> None:
            self.backend = dist.get_backend(self.trainer.model.process_group)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            self.seen[self.current_epoch] += batch.tolist()
            return self.layer(batch[:, None]).mean()

        def validation_step(self, batch: Any, index: int) -> None:
            self.validated += batch.tolist()

        def predict_step(self, batch: Any, index: int) -> Any:
            return batch

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    class Writer(BasePredictionWriter):
        def __init__(self) -> None:
            super().__init__("batch")
            self.rows: list[int] = []
            self.predicted: list[float] = []

        def write_on_batch_end(
            self, trainer: Any, module: Any, prediction: Any, batch_indices: Any, *_: Any
        ) -> None:
            self.rows += batch_indices
            self.predicted += prediction.tolist()

    module, writer = Module(), Writer()
    trainer = Trainer(
        max_epochs=2,
        reload_dataloaders_every_n_epochs=1,
        num_sanity_val_steps=0,
        check_val_every_n_epoch=2,
        default_root_dir=config["output"],
        callbacks=[TQDMProgressBar(), writer],
        strategy="ddp",
        logger=False,
    )
    trainer.fit(module, datamodule=Rows())
    trainer.predict(module, datamodule=Rows())
    mine = {
        "seen": module.seen,
        "validated": module.validated,
        "rows": writer.rows,
        "predicted": writer.predicted,
        "local_rank": trainer.local_rank,
        "backend": module.backend,
    }
    everybodys: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybodys, mine)
    polytrain.report({"everybodys": everybodys})


def test_whatever_a_trainer_has_works(quiet: RunConfig, tmp_path: Path) -> None:
    """Its progress bar, data that are prepared, loaders made anew, every row predicted once."""
    result = torch_runs.fit(quiet, use_what_a_trainer_has, {"output": str(tmp_path)})
    first, second = result.metrics["everybodys"]
    assert (first["local_rank"], second["local_rank"]) == (0, 1)
    assert first["backend"] == "polytrain_node"
    # Once for `fit`, and once for `predict`.
    assert (tmp_path / "prepared").read_text() == "once once "
    for epoch in range(2):
        assert sorted(first["seen"][epoch] + second["seen"][epoch]) == [*range(24)]
    assert first["seen"][0] != first["seen"][1]
    assert sorted(first["validated"] + second["validated"]) == [*range(9)]
    assert sorted(first["rows"] + second["rows"]) == [*range(25)]
    assert (first["predicted"], second["predicted"]) == (first["rows"], second["rows"])


def test_one_worker_is_enough(quiet: RunConfig, tmp_path: Path) -> None:
    result = fit(quiet, tmp_path, workers=1)
    assert result.metrics["step"] == 3 * 12
    assert all(each.isfinite().all() for each in weights(result).values())
