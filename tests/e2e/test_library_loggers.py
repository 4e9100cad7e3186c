"""Loggers of Lightning and Transformers in a run with killed workers: one version, steps once."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.e2e import torch_runs
from tests.sweeps import only_in_sweep

from polytrain import FailureConfig, RunConfig

Rows = list[dict[str, str]]
Scalars = dict[str, list[tuple[int, float]]]


def train_lightning(config: dict[str, Any]) -> None:
    import os
    import signal
    import sys
    from types import ModuleType

    # With this module, TensorBoard writes without TensorFlow, which takes long to import.
    sys.modules.setdefault("tensorboard.compat.notf", ModuleType("tensorboard.compat.notf"))
    import lightning
    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.cli import SaveConfigCallback
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
    from torch.utils.data import DataLoader, TensorDataset

    import polytrain
    from polytrain_torch.lightning import Trainer

    class Regression(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.save_hyperparameters({"width": 3})
            self.layer = torch.nn.Linear(3, 1)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            context = polytrain.get_context()
            dies_at = dict(enumerate(config["dies_at"])).get(context.get_attempt())
            if context.get_world_rank() == 1 and self.global_step == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            x, y = batch
            loss = (self.layer(x)[:, 0] - y).square().mean()
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            x, y = batch
            self.log("error", (self.layer(x)[:, 0] - y).abs().mean(), sync_dist=True)

        def on_train_epoch_end(self) -> None:
            self.log("passes", float(self.current_epoch))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    class Parser:
        """Saves as that of `LightningCLI` does."""

        def save(self, text: str, path: str, *, overwrite: bool, **_: Any) -> None:
            with Path(path).open("w" if overwrite else "x") as file:
                file.write(text)

    lightning.seed_everything(1, verbose=False)
    x = torch.arange(144.0).reshape(48, 3) / 144
    rows = TensorDataset(x, x.sum(1))
    output = config["output"]
    trainer = Trainer(
        max_epochs=3,
        default_root_dir=output,
        callbacks=[ModelCheckpoint(**config["saves"]), SaveConfigCallback(Parser(), "config")],
        logger=[CSVLogger(output, "csv"), TensorBoardLogger(output, "tb")],
        log_every_n_steps=1,
        enable_model_summary=False,
    )
    trainer.fit(Regression(), DataLoader(rows, batch_size=4), DataLoader(rows, batch_size=8))


def train_transformers(config: dict[str, Any]) -> None:
    import os
    import signal
    import sys
    from types import ModuleType

    sys.modules.setdefault("tensorboard.compat.notf", ModuleType("tensorboard.compat.notf"))
    import torch
    from transformers import (
        PretrainedConfig,
        PreTrainedModel,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    import polytrain
    from polytrain_torch.transformers import prepare_trainer

    class Regression(PreTrainedModel):
        config_class = PretrainedConfig

        def __init__(self, config: PretrainedConfig) -> None:
            super().__init__(config)
            self.layer = torch.nn.Linear(3, 1)
            self.post_init()

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            predicted = self.layer(x)[:, 0]
            return {"loss": (predicted - labels).square().mean(), "logits": predicted}

    class Dies(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            context = polytrain.get_context()
            dies_at = dict(enumerate(config["dies_at"])).get(context.get_attempt())
            if context.get_world_rank() == 1 and state.global_step == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)

    torch.manual_seed(1)
    x = torch.arange(144.0).reshape(48, 3) / 144
    rows = [{"x": row, "labels": row.sum()} for row in x]
    arguments = TrainingArguments(
        config["output"],
        per_device_train_batch_size=4,
        num_train_epochs=3,
        save_steps=4,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=6,
        report_to=["tensorboard"],
        disable_tqdm=True,
    )
    trainer = Trainer(
        Regression(PretrainedConfig()),
        arguments,
        train_dataset=rows,
        eval_dataset=rows,
        callbacks=[Dies()],
    )
    prepare_trainer(trainer).train()


def scalars(directory: Path) -> Scalars:
    """Read event files as TensorBoard does."""
    # With this module, TensorBoard reads without TensorFlow, which takes long to import.
    sys.modules.setdefault("tensorboard.compat.notf", ModuleType("tensorboard.compat.notf"))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    events.Reload()
    tags = events.Tags()["scalars"]
    return {tag: [(each.step, each.value) for each in events.Scalars(tag)] for tag in tags}


def lightnings_logs(
    run: RunConfig, output: Path, dies_at: list[int], saves: dict[str, Any]
) -> tuple[Rows, Scalars]:
    result = torch_runs.fit(
        run,
        train_lightning,
        {"output": str(output), "dies_at": dies_at, "saves": saves},
        libraries=("lightning", "polytrain_torch.lightning"),
        failure_config=FailureConfig(max_failures=len(dies_at)),
    )
    assert result.restarts == len(dies_at)
    (version,) = (output / "csv").iterdir()
    assert [each.name for each in (output / "tb").iterdir()] == [version.name]
    with (version / "metrics.csv").open(newline="") as file:
        rows = [{k: v for k, v in row.items() if v} for row in csv.DictReader(file)]
    return rows, scalars(output / "tb" / version.name)


EVERY_4_STEPS = {"every_n_train_steps": 4}
AFTER_EPOCHS = {"save_on_train_epoch_end": True}
AFTER_VALIDATION = {"save_on_train_epoch_end": False}


def without_doubles(events: Scalars) -> Scalars:
    return {tag: list(dict.fromkeys(points)) for tag, points in events.items()}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Rows, Scalars]:
    directory = tmp_path_factory.mktemp("undisturbed")
    run = RunConfig(storage_path=directory / "runs", progress=False)
    return lightnings_logs(run, directory / "output", [], EVERY_4_STEPS)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "saves", [EVERY_4_STEPS, only_in_sweep(AFTER_EPOCHS), only_in_sweep(AFTER_VALIDATION)]
)
def test_lightnings_loggers_keep_one_version(
    quiet: RunConfig, tmp_path: Path, undisturbed: tuple[Rows, Scalars], saves: dict[str, Any]
) -> None:
    """Kills come before the first checkpoint, in the middle of an epoch and after validation.

    None comes between a checkpoint and the row of its batch, which Lightning doesn't repeat.
    """
    rows, events = lightnings_logs(quiet, tmp_path / "output", [2, 10, 13], saves)
    own_rows, own_events = undisturbed
    assert [row["step"] for row in rows if "loss" in row] == [str(n) for n in range(18)]
    assert rows == own_rows
    if saves is AFTER_VALIDATION:
        # Lightning repeats on_train_epoch_end after such a checkpoint, before the first batch.
        events, own_events = without_doubles(events), without_doubles(own_events)
    assert events == own_events


def test_transformers_tensorboard_keeps_one_directory(quiet: RunConfig, tmp_path: Path) -> None:
    """Kills come before the first checkpoint and after the second one."""
    events = []
    for name, dies_at in (("undisturbed", []), ("killed", [2, 10])):
        output = tmp_path / name
        result = torch_runs.fit(
            quiet,
            train_transformers,
            {"output": str(output), "dies_at": dies_at},
            libraries=torch_runs.HUGGING_FACE,
            failure_config=FailureConfig(max_failures=len(dies_at)),
        )
        assert result.restarts == len(dies_at)
        (directory,) = (output / "runs").iterdir()
        read = scalars(directory)
        # Times differ from run to run, and train_loss is the mean since the newest start.
        varying = ("runtime", "_per_second", "train_loss")
        events.append({tag: each for tag, each in read.items() if not tag.endswith(varying)})
    assert [step for step, _ in events[0]["train/loss"]] == [*range(1, 19)]
    assert events[1] == events[0]
