"""What Lightning logs with `sync_dist=True` is over all rows, where ranks have unequal numbers."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.e2e import torch_runs

from polytrain import RunConfig

fit_with_library = partial(torch_runs.fit, libraries=("lightning", "polytrain_torch.lightning"))


def train(config: dict[str, Any]) -> None:
    """Log the rows themselves in every way that Lightning has, and write what it makes of them."""
    import json
    from pathlib import Path

    import lightning
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader, TensorDataset

    from polytrain_torch.lightning import Trainer

    class Logged(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            self.steps: list[Any] = []

        def log_rows(self, x: torch.Tensor, stage: str) -> None:
            log = partial(self.log, sync_dist=True)
            log(f"{stage}_mean", x.mean(), on_step=False, on_epoch=True)
            log(f"{stage}_avg", x.mean(), on_step=False, on_epoch=True, reduce_fx="avg")
            log(f"{stage}_sum", x.sum(), on_step=False, on_epoch=True, reduce_fx="sum")
            log(f"{stage}_min", x.min(), on_step=False, on_epoch=True, reduce_fx=torch.min)
            log(f"{stage}_max", x.max(), on_step=False, on_epoch=True, reduce_fx=max)
            log(f"{stage}_count", len(x), on_step=False, on_epoch=True, reduce_fx=sum)
            log(f"{stage}_forked", x.mean(), on_step=True, on_epoch=True)
            log(f"{stage}_given", x.mean(), on_step=False, on_epoch=True, batch_size=len(x))

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            (x,) = batch
            self.log_rows(x, "train")
            self.log("step", x.mean(), on_step=True, on_epoch=False, sync_dist=True)
            self.log(
                "step_max", x.max(), on_step=True, on_epoch=False, reduce_fx="max", sync_dist=True
            )
            return self.layer(x).sum()

        def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
            rows: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(rows, batch[0].flatten().tolist())
            names = ("step", "step_max", "train_forked_step")
            logged = {name: self.trainer.callback_metrics[name].item() for name in names}
            # A rank without a row of its own has one that counts nothing.
            self.steps.append([sorted({row for of_rank in rows for row in of_rank}), logged])

        def validation_step(self, batch: Any, index: int, dataloader_idx: int = 0) -> None:
            self.log_rows(batch[0], "valid")

        def test_step(self, batch: Any, index: int) -> None:
            self.log_rows(batch[0], "test")

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    def loader(rows: list[float]) -> Any:
        return DataLoader(TensorDataset(torch.tensor(rows)[:, None]), batch_size=config["batch"])

    options = {"logger": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = Trainer(max_epochs=1, num_sanity_val_steps=0, **options)
    module = Logged()
    trainer.fit(module, loader(config["train"]), [loader(rows) for rows in config["valid"]])
    logged = {name: value.item() for name, value in trainer.callback_metrics.items()}
    trainer.test(module, loader(config["test"]), verbose=False)
    logged |= {name: value.item() for name, value in trainer.callback_metrics.items()}
    if dist.get_rank() == 0:
        Path(config["output"]).write_text(json.dumps({"steps": module.steps, "logged": logged}))


def squares(count: int) -> list[float]:
    return [float(each * each) for each in range(count)]


@pytest.mark.parametrize(
    ("workers", "rows"),
    [
        (2, 5),
        pytest.param(2, 101, marks=pytest.mark.only_in_sweep),
        pytest.param(3, 11, marks=pytest.mark.only_in_sweep),
        # The last batch has one row, and three ranks have none of their own in it.
        (4, 9),
    ],
)
def test_every_reduction_is_over_all_rows(
    quiet: RunConfig, tmp_path: Path, workers: int, rows: int
) -> None:
    """Of 5 rows one rank has 3 and the other 2: a mean of the counts would be 2."""
    train_rows, test_rows = squares(rows), squares(rows + 2)
    valid = [squares(rows), [float(each) for each in range(rows + 1)]]
    output = tmp_path / "logged.json"
    fit_with_library(
        quiet,
        train,
        {
            "train": train_rows,
            "valid": valid,
            "test": test_rows,
            "batch": 2,
            "output": str(output),
        },
        workers=workers,
    )
    found = json.loads(output.read_text())
    logged = found["logged"]
    for stage, suffix, values in [
        ("train", "", train_rows),
        ("valid", "/dataloader_idx_0", valid[0]),
        ("valid", "/dataloader_idx_1", valid[1]),
        ("test", "", test_rows),
    ]:
        mean = pytest.approx(sum(values) / len(values))
        for name in ("mean", "avg", "given"):
            assert logged[f"{stage}_{name}{suffix}"] == mean, (stage, name)
        assert logged[f"{stage}_forked_epoch{suffix}"] == mean
        assert logged[f"{stage}_sum{suffix}"] == pytest.approx(sum(values))
        assert logged[f"{stage}_min{suffix}"] == min(values)
        assert logged[f"{stage}_max{suffix}"] == max(values)
        assert logged[f"{stage}_count{suffix}"] == len(values)
    assert sorted(row for values, _ in found["steps"] for row in values) == train_rows
    for values, of_step in found["steps"]:
        mean = pytest.approx(sum(values) / len(values))
        assert of_step == {"step": mean, "step_max": max(values), "train_forked_step": mean}
