"""Whose rows Lightning's loaders give, and where they resume."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from tests.e2e.torch_runs import TorchWith
from tests.plugin_torch.conftest import Run
from torch.utils.data import DistributedSampler

from polytrain.testing.local_world import run_world

ROWS = 12


def training_function(folder: str) -> Callable[[Any], None]:
    """Nested, so that it travels by value."""

    def train(config: Any) -> None:
        import lightning
        import torch
        from lightning.pytorch.callbacks import ModelCheckpoint
        from torch.utils.data import DataLoader

        import polytrain
        from polytrain_torch.lightning import Trainer

        class Rows(lightning.LightningModule):
            def __init__(self, stop_after: int = -1) -> None:
                super().__init__()
                self.layer = torch.nn.Linear(1, 1)
                self.rows: list[int] = []
                self.stop_after = stop_after

            def on_train_batch_start(self, batch: Any, index: int) -> int | None:
                return -1 if index == config["skips_from"] else None

            def training_step(self, batch: Any, index: int) -> torch.Tensor:
                if self.global_step == self.stop_after:
                    raise InterruptedError
                self.rows.extend(int(row) for row in batch)
                return self.layer(batch[:, None].float()).sum()

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=0.0)

        def fitted(*, stop_after: int = -1, epochs: int = 1, **options: Any) -> list[int]:
            trainer = Trainer(
                max_epochs=epochs,
                default_root_dir=folder,
                logger=False,
                enable_model_summary=False,
                callbacks=[ModelCheckpoint(every_n_train_steps=1)] if config["resumes"] else [],
                enable_checkpointing=config["resumes"],
                **options,
            )
            module = Rows(stop_after)
            try:
                trainer.fit(module, DataLoader(rows, **loader), ckpt_path=config.get("ckpt_path"))
            except InterruptedError:
                stopped.append(True)
            return module.rows

        rows = torch.arange(ROWS)
        stopped: list[bool] = []
        if config["resumes"]:
            loader: dict[str, Any] = {"batch_size": 2}
            if config["skips_from"] < 0:
                loader["sampler"] = DistributedSampler(rows)
            options = {"use_distributed_sampler": config["splits"]}
            is_first = polytrain.get_checkpoint() is None
            seen = fitted(stop_after=2 if is_first else -1, epochs=2, **options)
            if not stopped:
                polytrain.report({"rows": seen})
            return
        loader = {"batch_size": 2}
        seen_by_name = {"undivided": fitted(use_distributed_sampler=False)}
        loader = {"batch_size": 2, "sampler": DistributedSampler(rows, shuffle=False)}
        seen_by_name["divided"] = fitted()
        seen_by_name["divided by the user"] = fitted(use_distributed_sampler=False)
        polytrain.report(seen_by_name)

    return train


def test_what_the_user_divides_is_not_divided_again(tmp_path: Path) -> None:
    record = run_world(
        TorchWith(timeout_s=60, libraries=("lightning",)),
        data=pa.table({"x": [1.0, 2.0]}),
        path=tmp_path / "world",
        training_function=training_function(str(tmp_path / "lightning")),
        training_config={"resumes": False, "skips_from": -1},
    )
    failures = [str(rank.failure) for rank in record.ranks if rank.failure]
    assert not failures, "\n".join(failures)
    for number, rank in enumerate(record.ranks):
        part = [*range(number, ROWS, 2)]
        assert rank.reports[-1].metrics == {
            "undivided": [*range(ROWS)],
            "divided": part,
            "divided by the user": part,
        }


@pytest.mark.parametrize(("splits", "skips_from"), [(True, -1), (False, -1), (True, 2)])
def test_a_loader_goes_on_at_its_place(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture, splits: bool, skips_from: int
) -> None:
    """After two batches of the first epoch come its others, unless skipped, and the next epoch."""
    train = training_function(str(tmp_path / "lightning"))
    config = {"resumes": True, "splits": splits, "skips_from": skips_from}
    first = run(train, train_loop_config=config)
    resumed = run(train, train_loop_config=config, restore_from=first.checkpoint)
    if skips_from > 0:
        assert resumed.metrics["rows"] == [*range(4)]
        # A file of Lightning's has no place in the data.
        file = f"{first.checkpoint.path}/lightning.ckpt"
        run(train, train_loop_config={**config, "ckpt_path": file})
        assert "the rest of the epoch takes the epoch's first rows" in caplog.text
        return
    assert "first rows" not in caplog.text
    epochs = []
    for number in range(2):
        sampler = DistributedSampler(range(ROWS), 1, 0)
        sampler.set_epoch(number)
        epochs.append([*sampler])
    assert resumed.metrics["rows"] == epochs[0][4:] + epochs[1]


@pytest.mark.parametrize("has_length", [True, False])
def test_a_stream_with_a_state_goes_on_at_its_place(
    run: Run, tmp_path: Path, has_length: bool
) -> None:
    """Also where Lightning takes a batch ahead of its steps, because it knows no length."""

    def train() -> None:
        import lightning
        import torch
        from lightning.pytorch.callbacks import ModelCheckpoint
        from torch.utils.data import DataLoader, IterableDataset

        import polytrain
        from polytrain_torch.lightning import Trainer

        class Stream(IterableDataset[int]):
            def __init__(self) -> None:
                self.next = self.start = 0

            def __iter__(self) -> Any:
                start, self.start = self.start, 0
                for row in range(start, ROWS):
                    self.next = row + 1
                    yield row

            def state_dict(self) -> dict[str, int]:
                return {"next": self.next}

            def load_state_dict(self, state: dict[str, int]) -> None:
                self.start = state["next"]

        class SizedStream(Stream):
            def __len__(self) -> int:
                return ROWS

        class Rows(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.layer = torch.nn.Linear(1, 1)
                self.rows: list[int] = []

            def training_step(self, batch: Any, index: int) -> torch.Tensor:
                if is_first and self.global_step == 2:
                    raise InterruptedError
                self.rows.extend(int(row) for row in batch)
                return self.layer(batch[:, None].float()).sum()

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=0.0)

        is_first = polytrain.get_checkpoint() is None
        module = Rows()
        trainer = Trainer(
            max_epochs=2,
            default_root_dir=str(tmp_path / "lightning"),
            logger=False,
            enable_model_summary=False,
            callbacks=[ModelCheckpoint(every_n_train_steps=1)],
        )
        dataset = SizedStream() if has_length else Stream()
        try:
            trainer.fit(module, DataLoader(dataset, batch_size=2))
        except InterruptedError:
            return
        polytrain.report({"rows": module.rows})

    resumed = run(train, restore_from=run(train).checkpoint)
    assert resumed.metrics["rows"] == [*range(4, ROWS), *range(ROWS)]


def test_files_that_a_thread_saves_are_checkpoints(run: Run, tmp_path: Path) -> None:
    """Lightning's plugin returns from a save before there is a file."""

    def train() -> None:
        import time

        import lightning
        import torch
        from lightning.pytorch.callbacks import ModelCheckpoint
        from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
        from torch.utils.data import DataLoader

        from polytrain_torch.lightning import Trainer

        class Slow(TorchCheckpointIO):
            def save_checkpoint(self, *args: Any, **options: Any) -> None:
                time.sleep(0.2)
                super().save_checkpoint(*args, **options)

        class Module(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.layer = torch.nn.Linear(1, 1)

            def training_step(self, batch: Any, index: int) -> torch.Tensor:
                return self.layer(batch[:, None]).sum()

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=0.1)

        Trainer(
            max_epochs=1,
            default_root_dir=str(tmp_path / "lightning"),
            logger=False,
            enable_model_summary=False,
            plugins=[AsyncCheckpointIO(Slow())],
            callbacks=[ModelCheckpoint(every_n_train_steps=2)],
        ).fit(Module(), DataLoader(torch.ones(8), batch_size=2))

    assert [each["step"] for each in run(train).history] == [2, 4]
