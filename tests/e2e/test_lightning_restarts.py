"""What Lightning has logged, and BatchNorm's running means, where all workers of a run are lost.

No survivor hands on its state then: a restart has what the last checkpoint has.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.e2e import torch_runs
from tests.e2e.journals import journal
from tests.e2e.losses import lose_all_ranks
from tests.e2e.torch_runs import equal
from tests.sweeps import only_in_sweep

from polytrain import FailureConfig, Result, RunConfig

fit_with_library = partial(torch_runs.fit, libraries=("lightning", "polytrain_torch.lightning"))


def train(config: dict[str, Any]) -> None:
    """Both ranks die at a place of the batches of `dies_at`, from 1, one in each attempt."""
    import json

    import lightning
    import torch
    from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
    from torch.utils.data import DataLoader, IterableDataset, TensorDataset

    import polytrain
    from polytrain_torch.lightning import Trainer

    context = polytrain.get_context()
    dies_at = dict(enumerate(config["dies_at"]))
    epochs = {"max_epochs": config["options"].get("max_epochs", 3)}

    def at(place: str) -> None:
        batch = trainer.fit_loop.epoch_loop.batch_progress.total.ready
        if (place, batch) == (config["place"], dies_at.get(context.get_attempt())):
            lose_all_ranks()

    class Regression(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(
                torch.nn.Linear(3, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1)
            )
            self.automatic_optimization = not config["is_manual"]

        def on_train_start(self) -> None:
            assert self.trainer.max_epochs == epochs["max_epochs"]

        def on_train_batch_start(self, batch: Any, index: int) -> int | None:
            return -1 if index == config["ends_epochs_at"] else None

        def loss(self, batch: Any) -> torch.Tensor:
            x, y = batch
            return (self.layers(x)[:, 0] - y).square().mean()

        def training_step(self, batch: Any, index: int) -> Any:
            at("training")
            if trainer.fit_loop.epoch_loop.batch_progress.total.ready == config["stops_at"]:
                trainer.should_stop = True
            loss = self.loss(batch)
            self.log("alone", loss.detach(), on_step=True, on_epoch=True, prog_bar=True)
            if self.current_epoch == 0:
                self.log("first", loss.detach(), sync_dist=True)
            if not config["is_manual"]:
                return loss
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            return None

        def validation_step(self, batch: Any, index: int) -> None:
            if not trainer.sanity_checking:
                at("validation")
            self.log("error", self.loss(batch), sync_dist=True)

        def on_train_epoch_end(self) -> None:
            if config["plateau"].get("monitor") == "late":
                self.log("late", 1.0)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
            if not config["plateau"]:
                return optimizer
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, **config["lowers"])
            return [optimizer], [{"scheduler": plateau, "monitor": "error", **config["plateau"]}]

    class Stream(IterableDataset[Any]):
        """The rows in their order, with a place."""

        def __init__(self) -> None:
            self.start = self.given = 0

        def __len__(self) -> int:
            return len(rows)

        def __iter__(self) -> Any:
            self.given, self.start = self.start, 0
            while self.given < len(rows):
                self.given += 1
                yield rows[self.given - 1]

        def state_dict(self) -> dict[str, int]:
            return {"given": self.given}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.start = state["given"]

    class Saves(Callback):
        """Saves in one of its hooks."""

    def save(callback: Saves, trainer: Any, module: Any) -> None:
        trainer.save_checkpoint(Path(config["output"], "own.ckpt"))

    if config["saves_in"]:
        setattr(Saves, config["saves_in"], save)
    saves: Any = Saves() if config["saves_in"] else ModelCheckpoint(**config["saves"])
    lightning.seed_everything(1, verbose=False)
    x = torch.randn(48, 3)
    rows = TensorDataset(x, x.sum(1))
    module = Regression()
    trainer = Trainer(
        default_root_dir=config["output"],
        callbacks=[
            saves,
            *(EarlyStopping("error", **options) for options in config["stops"]),
        ],
        logger=False,
        enable_model_summary=False,
        enable_checkpointing=not config["saves_in"],
        **{**config["options"], **epochs},
    )
    loader = DataLoader(rows, batch_size=4, shuffle=True)
    if config["is_stream"]:
        loader = DataLoader(Stream(), batch_size=4)
    trainer.fit(module, loader, DataLoader(rows, batch_size=8), ckpt_path=config["from"])
    at("end")
    if trainer.global_rank == 0:
        torch.save(module.state_dict(), Path(config["output"], "weights.pt"))
        logged = {name: value.item() for name, value in trainer.callback_metrics.items()}
        Path(config["output"], "logged.json").write_text(json.dumps(logged))


def fit(quiet: RunConfig, output: Path, *dies_at: int, **config: Any) -> tuple[Result, Any]:
    output.mkdir()
    defaults = {
        **{"is_manual": False, "is_stream": False, "plateau": {}, "stops": [], "options": {}},
        **{"saves": {"every_n_train_steps": 2}, "saves_in": "", "from": None},
        **{"lowers": {"patience": 1, "threshold": 10.0}, "ends_epochs_at": None},
        "stops_at": None,
    }
    config = {"place": "training", **defaults, **config}
    config |= {"output": str(output), "dies_at": dies_at}
    allowed = FailureConfig(max_failures=len(dies_at))
    result = fit_with_library(quiet, train, config, failure_config=allowed)
    assert result.restarts == len(dies_at)
    # Each attempt continues from the checkpoint that the test is about.
    assert all(each["reason"] for each in journal(result.path, "SurvivorsAsked"))
    return result, torch.load(output / "weights.pt", weights_only=True)


BY_STEP = {"interval": "step", "frequency": 4}

CASES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "validates in every other epoch": ((5, 9, 15), {"options": {"check_val_every_n_epoch": 2}}),
    "saves and lowers its rate by epochs": (
        (9, 15),
        {"plateau": {"interval": "epoch"}, "saves": {}},
    ),
    "saves by epochs and counts its steps": (
        (9, 15),
        {"plateau": {"interval": "epoch"}, "saves": {}, "options": {"max_steps": 18}},
    ),
    "lowers its rate by what a rank alone has logged": (
        (15,),
        {
            "plateau": {"interval": "epoch", "monitor": "alone_epoch"},
            "lowers": {"patience": 1, "threshold": 10.0, "threshold_mode": "abs"},
            "saves": {},
            "options": {"max_epochs": 4},
        },
    ),
    "saves at the start of an epoch": (
        (9, 15),
        {"plateau": {"interval": "epoch"}, "saves_in": "on_train_epoch_start"},
    ),
    "ends epochs itself": (
        (7, 12),
        {
            "plateau": {"interval": "step", "frequency": 2},
            "ends_epochs_at": 4,
            "saves": {"save_on_train_epoch_end": True},
            "options": {"val_check_interval": 2},
        },
    ),
    "lowers its rate by epochs": ((5, 9, 15), {"plateau": {"interval": "epoch"}}),
    "lowers its rate by steps": (
        (5, 11, 17),
        {"plateau": BY_STEP, "options": {"val_check_interval": 3}},
    ),
    "optimizes manually": ((5, 9, 15), {"is_manual": True, "options": {"val_check_interval": 5}}),
    "reads a stream": ((7, 13), {"is_stream": True}),
}
"""At which batches the workers die, and what a run has beside the above."""

IN_TEST = ("ends epochs itself", "lowers its rate by steps")
"""Those of `make test`: epochs that end early, and a rate by steps."""


@pytest.mark.sweep
@pytest.mark.parametrize(
    "case", [case if case in IN_TEST else only_in_sweep(case, id=case) for case in CASES]
)
def test_restarts_report_what_a_run_without_them_reports(
    quiet: RunConfig, tmp_path: Path, case: str
) -> None:
    dies_at, config = CASES[case]
    undisturbed, expected = fit(quiet, tmp_path / "undisturbed", **config)
    killed, weights = fit(quiet, tmp_path / "killed", *dies_at, **config)
    assert equal(weights, expected)
    assert killed.history == undisturbed.history
    # Also the last validation, and the means of the last epoch.
    logged = json.loads((tmp_path / "killed" / "logged.json").read_text())
    assert logged.items() <= killed.metrics.items()


BEFORE: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "validates within epochs": ((4, 10), {"options": {"val_check_interval": 2}}),
    "stops early": ((6, 12), {"stops": [{"patience": 1, "min_delta": 10.0}]}),
    "is at its end": ((18,), {"is_manual": True}),
}
"""Cases whose workers die in a validation, after the checkpoint of the step before it."""


@pytest.mark.sweep
@pytest.mark.parametrize(
    "case",
    [case if case.startswith("validates") else only_in_sweep(case, id=case) for case in BEFORE],
)
def test_a_validation_that_is_lost_is_made_up_for(
    quiet: RunConfig, tmp_path: Path, case: str
) -> None:
    dies_at, config = BEFORE[case]
    undisturbed, expected = fit(quiet, tmp_path / "undisturbed", **config)
    killed, weights = fit(quiet, tmp_path / "killed", *dies_at, place="validation", **config)
    assert equal(weights, expected)
    assert killed.history == undisturbed.history


def test_a_metric_that_a_checkpoint_lacks_lowers_no_rate(quiet: RunConfig, tmp_path: Path) -> None:
    # The module's last hook, which logs it, comes after the callback's.
    late = {"interval": "epoch", "monitor": "late"}
    result, _ = fit(quiet, tmp_path / "run", 9, plateau=late, saves_in="on_train_epoch_end")
    assert result.metrics["epoch"] == 2


def test_a_first_attempt_begins_within_an_epoch_of_another_run(
    quiet: RunConfig, tmp_path: Path
) -> None:
    config = {"plateau": {"interval": "epoch"}, "saves": {}}
    within = {"val_check_interval": 3}
    before, _ = fit(quiet, tmp_path / "a", **config, options={**within, "max_epochs": 1})
    assert before.checkpoint is not None
    file = f"{before.checkpoint.path}/lightning.ckpt"
    after, _ = fit(quiet, tmp_path / "b", **config, options=within, **{"from": file})
    assert after.metrics["step"] == 18


STOPPED: dict[str, tuple[int, dict[str, Any]]] = {
    "after an epoch": (12, {"stops": [{"patience": 1, "min_delta": 10.0}]}),
    "after a validation within an epoch": (
        9,
        {"stops": [{"patience": 2, "min_delta": 10.0}], "options": {"val_check_interval": 3}},
    ),
    "between two validations of an epoch": (
        8,
        {"stops_at": 8, "options": {"val_check_interval": 3}},
    ),
}
"""At which batch a training stops early, and what stops it."""


@pytest.mark.sweep
@pytest.mark.parametrize(
    "case",
    [case if "within" in case else only_in_sweep(case, id=case) for case in STOPPED],
)
def test_a_restart_after_an_early_stop_trains_no_further(
    quiet: RunConfig, tmp_path: Path, case: str
) -> None:
    batches, config = STOPPED[case]
    config |= {"saves": {}, "place": "end"}
    undisturbed, expected = fit(quiet, tmp_path / "undisturbed", **config)
    assert undisturbed.metrics["step"] == batches
    killed, weights = fit(quiet, tmp_path / "killed", batches, **config)
    assert equal(weights, expected)
    assert killed.history == undisturbed.history
