"""Lightning's finders of a learning rate and a batch size, in runs that are killed and resumed."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.e2e import torch_runs
from tests.e2e.losses import lose_all_ranks
from tests.sweeps import only_in_sweep

from polytrain import Result, RunConfig, TrainingFailedError

fit_with_library = partial(torch_runs.fit, libraries=("lightning", "polytrain_torch.lightning"))


def train(config: dict[str, Any]) -> None:
    import lightning
    import torch
    from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder, ModelCheckpoint
    from lightning.pytorch.tuner import Tuner
    from torch.utils.data import DataLoader, TensorDataset

    import polytrain
    from polytrain_torch.lightning import Trainer

    context = polytrain.get_context()

    class Regression(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(3, 1)
            self.lr = 0.01
            self.batch_size = 4

        def train_dataloader(self) -> Any:
            x = torch.arange(144.0).reshape(48, 3) / 144
            return DataLoader(TensorDataset(x, x.sum(1)), self.batch_size, shuffle=True)

        def on_train_batch_start(self, batch: Any, index: int) -> None:
            is_time = trainer.global_step == 3 and saves in trainer.callbacks
            if config["dies"] and is_time and context.get_attempt() == 0:
                lose_all_ranks()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            x, y = batch
            return (self.layer(x)[:, 0] - y).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)

    class SearchesLater(LearningRateFinder):
        def on_fit_start(self, *given: Any) -> None:
            pass

        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            if trainer.current_epoch == 2:
                self.lr_find(trainer, module)

    lightning.seed_everything(1, verbose=False)
    saves, module = ModelCheckpoint(every_n_train_steps=2), Regression()
    finders: dict[str, Any] = {
        "LearningRateFinder": partial(LearningRateFinder, num_training_steps=30),
        "BatchSizeFinder": partial(BatchSizeFinder, max_trials=3, max_val=16),
        "searches later": SearchesLater,
    }
    finder = finders[config["what"]]() if config["what"] in finders else None
    trainer = Trainer(
        max_epochs=3,
        default_root_dir=config["output"],
        callbacks=[saves, *([finder] if finder else [])],
        logger=False,
        enable_model_summary=False,
    )
    match config["what"]:
        case "lr_find":
            Tuner(trainer).lr_find(module, num_training=30)
        case "scale_batch_size":
            Tuner(trainer).scale_batch_size(module, max_trials=3, max_val=16)
    trainer.fit(module)
    weights = [float(each) for part in module.parameters() for each in part.detach().flatten()]
    found = finder.optimal_lr.suggestion() if config["what"] == "LearningRateFinder" else None
    polytrain.report(
        {"weights": weights, "rate": module.lr, "size": module.batch_size, "found": found}
    )


def trained(quiet: RunConfig, output: Path, what: str, *, dies: bool) -> Result:
    # Lightning's search for a batch size refuses several workers.
    workers = 1 if "atch" in what else 2
    config = {"what": what, "dies": dies, "output": str(output)}
    return fit_with_library(quiet, train, config, workers=workers)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "what",
    [
        "LearningRateFinder",
        *(
            only_in_sweep(what, id=what)
            for what in ("lr_find", "BatchSizeFinder", "scale_batch_size")
        ),
    ],
)
def test_a_killed_run_ends_with_what_was_found_and_the_same_weights(
    quiet: RunConfig, tmp_path: Path, what: str
) -> None:
    undisturbed = trained(quiet, tmp_path / "undisturbed", what, dies=False)
    killed = trained(quiet, tmp_path / "killed", what, dies=True)
    assert (undisturbed.restarts, killed.restarts) == (0, 1)
    names = ("weights", "rate", "size", "found")
    assert [killed.metrics[name] for name in names] == [undisturbed.metrics[name] for name in names]
    assert (killed.metrics["rate"], killed.metrics["size"]) != (0.01, 4), "nothing was found"


def test_a_search_during_training_is_refused_before_the_first_step(
    quiet: RunConfig, tmp_path: Path
) -> None:
    with pytest.raises(TrainingFailedError, match=r"SearchesLater\.on_train_epoch_start.*own run"):
        trained(quiet, tmp_path, "searches later", dies=False)
