"""Lightning's `Trainer`, killed and resumed."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.e2e import torch_runs
from tests.e2e.torch_runs import equal
from tests.sweeps import only_in_sweep

from polytrain import (
    CheckpointConfig,
    Result,
    RunConfig,
    TrainingFailedError,
)

fit_with_library = partial(torch_runs.fit, libraries=("lightning", "polytrain_torch.lightning"))


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
            self.batches = self.validations = 0

        def on_validation_epoch_end(self) -> None:
            self.validations += 1

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            self.batches += 1
            context = polytrain.get_context()
            dies = context.get_world_rank() == 1 and context.get_attempt() == 0
            if dies and self.global_step == config["dies_after"]:
                os.kill(os.getpid(), signal.SIGKILL)
            x, y = batch
            loss = (self.layers(x)[:, 0] - y).square().mean()
            self.log("loss", loss, sync_dist=True)
            log = partial(self.log, sync_dist=True, on_step=False, on_epoch=True)
            log("mean", loss)
            log("most", loss, reduce_fx=max, add_dataloader_idx=False)
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            x, y = batch
            self.log("error", (self.layers(x)[:, 0] - y).abs().mean(), sync_dist=True)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
            if not config["is_scheduled"]:
                return optimizer
            # Lightning counts the batches here, before a restart has loaded its own counts.
            steps = self.trainer.estimated_stepping_batches
            rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
            return [optimizer], [{"scheduler": rate, "interval": "step"}]

    lightning.seed_everything(1, verbose=False)
    x = torch.arange(144.0).reshape(48, 3) / 144
    rows = TensorDataset(x, x.sum(1))
    trainer = Trainer(
        max_epochs=3,
        default_root_dir=config["output"],
        callbacks=[ModelCheckpoint(every_n_train_steps=config["saves_every"])],
        logger=False,
        enable_model_summary=False,
        **config["options"],
    )
    module = Regression()
    trainer.fit(
        module, DataLoader(rows, batch_size=4, shuffle=True), DataLoader(rows, batch_size=8)
    )
    polytrain.report({"batches": module.batches, "validations": module.validations})


def fit(
    quiet: RunConfig,
    output: Path,
    *,
    dies_after: int = -1,
    saves_every: int | None = 4,
    is_scheduled: bool = False,
    options: dict[str, Any] | None = None,
    **changes: Any,
) -> Result:
    config = {
        "is_scheduled": is_scheduled,
        "output": str(output),
        "dies_after": dies_after,
        "saves_every": saves_every,
        "options": options or {},
    }
    return fit_with_library(quiet, train, config, **changes)


def weights(result: Result) -> dict[str, torch.Tensor]:
    assert result.checkpoint is not None
    file = Path(result.checkpoint.path, "lightning.ckpt")
    state: dict[str, torch.Tensor] = torch.load(file, weights_only=True)["state_dict"]
    return state


# In `make test` each who writes once, over all front ends: `test_torch_rank_states` has the rest.
@pytest.mark.sweep
@pytest.mark.parametrize("written_by", ["rank_0", only_in_sweep("every_rank")])
def test_a_killed_run_ends_in_the_same_weights(
    quiet: RunConfig, tmp_path: Path, written_by: Any
) -> None:
    """It dies in the middle of an epoch, behind a checkpoint."""
    config = CheckpointConfig(written_by=written_by)
    undisturbed = fit(quiet, tmp_path / "undisturbed", checkpoint_config=config)
    killed = fit(quiet, tmp_path / "killed", dies_after=10, checkpoint_config=config)
    assert killed.restarts == 1
    assert equal(weights(killed), weights(undisturbed))
    steps = [report["step"] for report in killed.history if "step" in report]
    # The checkpoint of step 12 is from before the validation and the means of its epoch.
    assert steps == [4, 6, 8, 12, 12, 16, 18]


@pytest.mark.sweep
@pytest.mark.only_in_sweep
def test_loaders_that_are_made_anew_go_on_in_the_middle_too(
    quiet: RunConfig, tmp_path: Path
) -> None:
    options = {"reload_dataloaders_every_n_epochs": 1}
    undisturbed = fit(quiet, tmp_path / "undisturbed", options=options)
    killed = fit(quiet, tmp_path / "killed", dies_after=10, options=options)
    assert killed.restarts == 1
    assert equal(weights(killed), weights(undisturbed))


# `test_lightning_survivors` has such a schedule without loaders that are reloaded.
@pytest.mark.sweep
@pytest.mark.parametrize("reloads_every", [only_in_sweep(0), 2])
def test_a_schedule_over_all_steps_goes_on_in_the_middle(
    quiet: RunConfig, tmp_path: Path, reloads_every: int
) -> None:
    """From what a rank that is left has, or from a checkpoint if loaders are reloaded."""
    options = {"reload_dataloaders_every_n_epochs": reloads_every, "val_check_interval": 0.5}
    undisturbed = fit(quiet, tmp_path / "undisturbed", options=options, is_scheduled=True)
    killed = fit(quiet, tmp_path / "killed", dies_after=10, options=options, is_scheduled=True)
    assert killed.restarts == 1
    assert equal(weights(killed), weights(undisturbed))
    steps = [report["step"] for report in killed.history if "step" in report]
    assert steps == [4, 6, 8, 12, 12, 16, 18]
    # The values over the epoch within which it was killed.
    for name in ("mean", "most"):
        assert killed.history[4][name] == undisturbed.history[4][name]


ENDS = {
    "the default": (None, {}, 6),
    "a part of the batches": (None, {"limit_train_batches": 4}, 4),
    "validation within": (None, {"val_check_interval": 2}, 6),
}


@pytest.mark.sweep
@pytest.mark.parametrize(
    "name",
    [name if name == "validation within" else only_in_sweep(name, id=name) for name in ENDS],
)
def test_an_epoch_that_a_checkpoint_ends_is_followed_by_the_next(
    quiet: RunConfig, tmp_path: Path, name: str
) -> None:
    saves_every, options, steps = ENDS[name]

    def ended(dies_after: int) -> Result:
        output = tmp_path / str(dies_after)
        return fit(quiet, output, dies_after=dies_after, saves_every=saves_every, options=options)

    undisturbed, killed = ended(-1), ended(2 * steps + 1)
    assert killed.restarts == 1
    assert undisturbed.metrics["batches"] == 3 * steps
    assert killed.metrics["batches"] in (steps, 2 * steps)
    assert equal(weights(killed), weights(undisturbed))


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("before", "after", "batches"),
    [only_in_sweep(2, 1, 4 + 12 + 12), (1, 2, 4 + 6 + 6)],
)
def test_another_number_of_workers_goes_on_in_the_middle(
    quiet: RunConfig, tmp_path: Path, before: int, after: int, batches: int
) -> None:
    begun = fit(quiet, tmp_path, workers=before, options={"max_steps": 4})
    assert begun.checkpoint is not None
    result = fit(quiet, tmp_path, workers=after, restore_from=begun.checkpoint)
    # Forty-eight rows an epoch, four to a worker's batch; of the first some were done.
    assert result.metrics == {"batches": batches, "validations": 3}


def finds_its_best_model_early(config: dict[str, Any]) -> Any:
    """The directory of its best models is gone when it resumes."""
    import os
    import shutil
    import signal

    import lightning
    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch.utils.data import DataLoader, TensorDataset

    import polytrain
    from polytrain_torch.lightning import Trainer

    is_first = polytrain.get_context().get_attempt() == 0
    directory = config["output"] + ("" if is_first else config["moves_to"])

    class Weight(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            if config["dies"] and is_first and self.global_step == 7:
                shutil.rmtree(directory, ignore_errors=True)
                os.kill(os.getpid(), signal.SIGKILL)
            assert is_first or Path(best.last_model_path).is_file()
            return (self.weight - 1).square().sum()

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("error", abs(self.global_step - 4.0), sync_dist=True)

        def test_step(self, batch: Any, index: int) -> None:
            self.log("tested", self.weight.sum(), sync_dist=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    best = ModelCheckpoint(dirpath=directory, monitor="error", save_top_k=3, save_last=True)
    trainer = Trainer(max_epochs=4, callbacks=[best], logger=False, enable_model_summary=False)
    loader = DataLoader(TensorDataset(torch.ones(8, 1)), batch_size=2)
    model = Weight()
    trainer.fit(model, loader, loader)
    names = {Path(path).name: score.item() for path, score in best.best_k_models.items()}
    assert all(Path(path).parent == Path(directory) for path in best.best_k_models)
    score = best.best_model_score.item() if best.best_model_score is not None else None
    return names, score, trainer.test(model, loader, ckpt_path="best", verbose=False)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("keeps_best", "moves_to"), [only_in_sweep(True, ""), (True, "2"), only_in_sweep(False, "")]
)
def test_the_best_models_are_taken_from_the_runs_checkpoints(
    quiet: RunConfig,
    tmp_path: Path,
    keeps_best: bool,
    moves_to: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The directory that had them is gone, as on another machine."""

    def returned(name: str, **changes: Any) -> Any:
        config = {"output": str(tmp_path / name), "dies": name == "killed", "moves_to": moves_to}
        return fit_with_library(quiet, finds_its_best_model_early, config, **changes).return_value

    whole = returned("whole")
    names = ("epoch=0-step=2.ckpt", "epoch=1-step=4.ckpt", "epoch=2-step=6.ckpt")
    assert whole[:2] == (dict(zip(names, (2.0, 0.0, 2.0), strict=True)), 0.0)
    best = {"checkpoint_score_attribute": "error", "checkpoint_score_order": "min"}
    kept = (
        CheckpointConfig(num_to_keep=3, **best) if keeps_best else CheckpointConfig(num_to_keep=1)
    )
    killed = returned("killed", checkpoint_config=kept)
    assert (killed == whole) is keeps_best
    lost = "The best model so far is lost: "
    assert (lost in "".join(capfd.readouterr())) is not keeps_best


def fits_unusually(config: dict[str, Any]) -> None:
    import os
    import signal
    from pathlib import Path

    import lightning
    import torch
    from lightning.pytorch.callbacks import LearningRateFinder
    from torch.utils.data import DataLoader

    import polytrain
    from polytrain_torch.lightning import Trainer

    class Module(lightning.LightningModule):
        def __init__(self, words: Any = None) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.layer = torch.nn.Linear(1, 1)
            self.lr = 0.1

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            batches = batch.values() if isinstance(batch, dict) else [batch]
            return sum(self.layer(each[:, None]).square().mean() for each in batches)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=self.lr)

    class Forgetful(torch.optim.SGD):
        def load_state_dict(self, state_dict: Any) -> None:
            raise KeyError("moments")

    class Forgets(Module):
        def configure_optimizers(self) -> Any:
            return Forgetful(self.parameters(), lr=self.lr)

    def loader(rows: int) -> Any:
        return DataLoader(torch.arange(float(rows)) / rows, batch_size=4)

    def fitted(module: Any, loaders: Any, **options: Any) -> Any:
        usual = {"logger": False, "enable_model_summary": False, "max_epochs": 1}
        root = config["output"]
        Trainer(default_root_dir=root, **{**usual, **options}).fit(module, loaders)
        return module

    match config["what"]:
        case "two fits":
            fitted(Module(), loader(16))
            fitted(Module(), loader(16))
            context = polytrain.get_context()
            if context.get_world_rank() == 0:
                # It waits until the second one's is committed.
                polytrain.get_checkpoint()
            torch.distributed.barrier()
            if context.get_world_rank() == 1 and context.get_attempt() == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        case "an optimizer":
            fitted(Forgets(), loader(16))
        case "a path":
            fitted(Module(Path("words.txt")), loader(16))
        case "a finder":
            finder = LearningRateFinder(num_training_steps=5)
            fitted(Module(), loader(64), callbacks=[finder])
        case "two loaders":
            saves = lightning.pytorch.callbacks.ModelCheckpoint(every_n_train_steps=1)
            fitted(Module(), {"a": loader(16), "b": loader(32)}, callbacks=[saves])


def fit_unusually(quiet: RunConfig, tmp_path: Path, what: str) -> Result:
    return fit_with_library(quiet, fits_unusually, {"what": what, "output": str(tmp_path)})


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("two fits", r"fit\(\) number 1.*number 2 saved .*own run"),
        ("an optimizer", r"Forgetful: .*can't be loaded.*raised KeyError: 'moments'"),
        ("a path", r"PosixPath, which isn't plain data.*save_hyperparameters\(ignore="),
    ],
)
def test_what_no_restart_could_go_on_with_is_refused(
    quiet: RunConfig, tmp_path: Path, what: str, message: str
) -> None:
    with pytest.raises(TrainingFailedError, match=message):
        fit_unusually(quiet, tmp_path, what)


def test_what_a_finder_saves_is_no_checkpoint(quiet: RunConfig, tmp_path: Path) -> None:
    result = fit_unusually(quiet, tmp_path, "a finder")
    # Eight batches on each of two workers, and one checkpoint at the epoch's end.
    assert [report["step"] for report in result.history] == [8]


def test_several_loaders_are_gone_on_with_at_the_start_of_epochs(
    quiet: RunConfig, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    result = fit_unusually(quiet, tmp_path, "two loaders")
    assert [report["step"] for report in result.history] == [4]
    assert result.checkpoint is not None
    assert "only at the start of an epoch" in capfd.readouterr().err


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
    result = fit_with_library(quiet, use_what_a_trainer_has, {"output": str(tmp_path)})
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
    assert result.metrics["batches"] == 3 * 12
    assert all(each.isfinite().all() for each in weights(result).values())


def train_apart(config: dict[str, Any]) -> list[Any]:
    """Each rank returns what it ends with."""
    import os
    import signal

    import lightning
    import torch
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.strategies import DDPStrategy
    from torch.utils.data import DataLoader, TensorDataset

    import polytrain
    from polytrain_torch.lightning import Trainer

    context = polytrain.get_context()
    rank = context.get_world_rank()

    class Counting(Callback):
        count = 0

        def on_train_batch_end(self, *_: Any) -> None:
            self.count += rank + 1

        def state_dict(self) -> dict[str, int]:
            return {"count": self.count}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.count = state["count"]

    class Normalised(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            dies = rank == 1 and context.get_attempt() == 0
            if dies and self.current_epoch == config.get("dies_in"):
                os.kill(os.getpid(), signal.SIGKILL)
            loss = self.layers(batch[0]).square().sum()
            self.log("loss", loss, sync_dist=True)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    lightning.seed_everything(1, verbose=False)
    module, counting = Normalised(), Counting()
    trainer = Trainer(
        max_epochs=config.get("epochs", 3),
        default_root_dir=config["output"],
        callbacks=[counting],
        strategy=DDPStrategy(broadcast_buffers=config["sends"]),
        logger=False,
        enable_model_summary=False,
    )
    rows = TensorDataset(torch.arange(72.0).reshape(24, 3))
    trainer.fit(module, DataLoader(rows, batch_size=4))
    return [counting.count, [each.tolist() for each in module.state_dict().values()]]


def test_what_differs_by_rank_comes_back_to_its_rank(quiet: RunConfig, tmp_path: Path) -> None:
    """BatchNorm's statistics, and a callback's state."""
    config = {"output": str(tmp_path), "sends": False}
    undisturbed = fit_with_library(quiet, train_apart, config)
    killed = fit_with_library(quiet, train_apart, {**config, "dies_in": 2})
    assert killed.restarts == 1
    assert killed.return_values == undisturbed.return_values
    assert [each[0] for each in killed.return_values] == [9, 18]
    more = {**config, "epochs": 4}
    with pytest.raises(TrainingFailedError, match=r"Normalised: each of the 2 workers"):
        fit_with_library(quiet, train_apart, more, workers=3, restore_from=killed.checkpoint)


def test_on_other_workers_callbacks_begin_with_rank_0s_state(
    quiet: RunConfig, tmp_path: Path
) -> None:
    """What DDP sends from rank 0 isn't an error either."""
    config = {"output": str(tmp_path), "sends": True, "epochs": 1}
    made = fit_with_library(quiet, train_apart, config)
    resumed = fit_with_library(
        quiet, train_apart, {**config, "epochs": 2}, workers=1, restore_from=made.checkpoint
    )
    assert [each[0] for each in resumed.return_values] == [3 + 6]


def note_ranks(config: dict[str, Any]) -> tuple[int, int]:
    import lightning.fabric.utilities.rank_zero
    import torchmetrics.utilities.prints

    noted = (lightning.fabric.utilities.rank_zero, torchmetrics.utilities.prints)
    first, second = (module.rank_zero_only.rank for module in noted)
    return first, second


def test_a_rank_is_noted_before_there_is_a_trainer(quiet: RunConfig) -> None:
    """Also in a fork of a process that has imported the libraries, and has no rank."""
    result = fit_with_library(quiet, note_ranks, {})
    assert result.return_values == ((0, 0), (1, 1))
