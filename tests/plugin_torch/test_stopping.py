"""A stop on one rank stops all, with the libraries on top of torch; Keras is in test_keras."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.e2e.torch_runs import HUGGING_FACE, TorchWith

from polytrain.testing.local_world import run_world


def with_lightning(folder: str) -> dict[str, int]:
    """By the hook in which rank 1 stops in the second epoch: the batches of this rank."""
    import lightning
    import torch
    from torch.utils.data import DataLoader

    from polytrain_torch.lightning import Trainer

    class Module(lightning.LightningModule):
        def __init__(self, hook: str) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            self.batches, self.hook = 0, hook

        def stop_in(self, hook: str) -> None:
            if hook == self.hook and self.global_rank == 1 and self.current_epoch == 1:
                self.trainer.should_stop = True

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            self.batches += 1
            self.stop_in("training_step")
            return self.layer(batch[:, None]).square().mean()

        def validation_step(self, batch: Any, index: int) -> None:
            """Nothing to measure."""

        def on_train_batch_end(self, *_: Any) -> None:
            self.stop_in("on_train_batch_end")

        def on_validation_end(self) -> None:
            self.stop_in("on_validation_end")

        def on_train_epoch_end(self) -> None:
            self.stop_in("on_train_epoch_end")

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    found = {}
    rows = DataLoader(torch.ones(16), batch_size=2)
    for hook in ("training_step", "on_train_batch_end", "on_validation_end", "on_train_epoch_end"):
        module = Module(hook)
        Trainer(
            max_epochs=3,
            default_root_dir=folder,
            val_check_interval=2,
            logger=False,
            enable_model_summary=False,
            enable_checkpointing=False,
        ).fit(module, rows, rows)
        found[hook] = module.batches
    return found


def with_transformers(folder: str) -> dict[str, int]:
    """By the event in which rank 1 stops: the steps of this rank."""
    import torch
    import torch.distributed as dist
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from polytrain_torch.transformers import prepare_trainer

    class Regression(torch.nn.Linear):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": (super().forward(x)[:, 0] - labels).square().mean()}

    def stop(args: Any, state: Any, control: Any, **_: Any) -> None:
        if dist.get_rank() == 1 and state.global_step >= 3:
            control.should_training_stop = True

    found = {}
    rows = [{"x": torch.ones(3), "labels": torch.ones(())}] * 16
    for event in ("on_step_end", "on_log", "on_epoch_end"):
        stops = type("Stops", (TrainerCallback,), {event: staticmethod(stop)})()
        arguments = TrainingArguments(
            folder,
            num_train_epochs=3,
            per_device_train_batch_size=2,
            logging_steps=2,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = Trainer(Regression(3, 1), arguments, train_dataset=rows)
        # Added last: other callbacks have been called before it.
        prepare_trainer(trainer).add_callback(stops)
        trainer.train()
        found[event] = trainer.state.global_step
    return found


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        # Four batches in an epoch of two workers.
        (
            with_lightning,
            {
                "training_step": 5,
                "on_train_batch_end": 5,
                "on_validation_end": 6,
                "on_train_epoch_end": 8,
            },
        ),
        (with_transformers, {"on_step_end": 3, "on_log": 4, "on_epoch_end": 4}),
    ],
)
def test_one_rank_stops_all(tmp_path: Path, function: Any, expected: dict[str, int]) -> None:
    def train(config: Any) -> None:
        import polytrain

        polytrain.report(function(config["folder"]))

    record = run_world(
        TorchWith(timeout_s=60, libraries=HUGGING_FACE),
        data=pa.table({"x": [0.0] * 4}),
        path=tmp_path / "world",
        training_function=train,
        training_config={"folder": str(tmp_path / "library")},
    )
    failures = [str(rank.failure) for rank in record.ranks if rank.failure]
    assert not failures, "\n".join(failures)
    assert [rank.reports[-1].metrics for rank in record.ranks] == [expected, expected]
