"""DDP of libraries doesn't average what is unfrozen after it has wrapped a model: it is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.e2e.torch_runs import HUGGING_FACE, TorchWith

from polytrain.testing.local_world import run_world


def with_lightning(folder: str) -> None:
    import lightning
    import torch
    from torch.utils.data import DataLoader

    from polytrain_torch.lightning import Trainer

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
            self.layers[0].requires_grad_(False)

        def on_train_epoch_start(self) -> None:
            self.layers[0].requires_grad_(self.current_epoch > 0)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return self.layers(batch[:, None]).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    Trainer(
        max_epochs=2,
        default_root_dir=folder,
        logger=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    ).fit(Module(), DataLoader(torch.ones(4)))


def with_transformers(folder: str) -> None:
    import torch
    from transformers import (
        PretrainedConfig,
        PreTrainedModel,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    from polytrain_torch.transformers import prepare_trainer

    class Model(PreTrainedModel):
        config_class = PretrainedConfig

        def __init__(self, config: PretrainedConfig) -> None:
            super().__init__(config)
            self.layers = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
            self.layers[0].requires_grad_(False)
            self.post_init()

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.layers(x).sum()}

    class Unfreezes(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **options: Any) -> None:
            options["model"].requires_grad_(True)

    arguments = TrainingArguments(folder, max_steps=2, report_to=[], disable_tqdm=True)
    rows = [{"x": torch.ones(1)}] * 64
    trainer = Trainer(Model(PretrainedConfig()), arguments, train_dataset=rows)
    trainer.add_callback(Unfreezes())
    prepare_trainer(trainer).train()


def with_accelerate(folder: str) -> None:
    import torch
    from accelerate import Accelerator

    from polytrain_torch.accelerate import restore

    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    model[0].requires_grad_(False)
    accelerator = Accelerator()
    prepared = accelerator.prepare(model)
    restore(accelerator)
    for _ in range(2):
        prepared(torch.ones(1, 1)).sum().backward()
        model.requires_grad_(True)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (with_lightning, r"frozen when Lightning wrapped .*on_train_start.*find_unused"),
        (with_transformers, r"frozen when train\(\) wrapped .*two calls of train"),
        (with_accelerate, r"frozen when prepare wrapped .*after accelerator\.prepare"),
    ],
)
def test_what_ddp_does_not_average_is_not_trained(
    tmp_path: Path, function: Any, message: str
) -> None:
    import re

    def train(config: Any) -> None:
        function(config["folder"])

    world = run_world(
        TorchWith(timeout_s=60, libraries=HUGGING_FACE),
        data=pa.table({"x": [0.0] * 4}),
        path=tmp_path / "world",
        training_function=train,
        training_config={"folder": str(tmp_path / "library")},
    )
    failures = [rank.failure.failure.message for rank in world.ranks if rank.failure]
    assert failures
    assert re.search(message, failures[0]), failures
