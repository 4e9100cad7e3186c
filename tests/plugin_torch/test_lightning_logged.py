"""What Lightning has logged in an epoch continues within it, with the arguments of `log`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.plugin_torch.kept_ranks import small_state

from polytrain.extension import KeptState, NotCleanError
from polytrain_torch.survivors.kept_by_rank import KeptByRank

VALUES = [3.0, 8.0, 1.0, 2.0]
"""What the batches of an epoch log."""


def logged(directory: Path, options: dict[str, Any], *, continues: bool) -> float:
    """Return what an epoch logs, in one `fit` or in two."""
    import lightning

    from polytrain_torch.lightning.private import Logged

    class Regression(lightning.LightningModule):
        def __init__(self, kept: dict[str, Any]) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            self.kept = kept

        def on_train_batch_start(self, batch: torch.Tensor, index: int) -> None:
            if self.kept and index == 0:
                Logged(self.trainer).restore_sums(self.kept)

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            self.log("value", batch.mean(), on_step=False, on_epoch=True, **options)
            return self.layer(batch).sum()

        def on_train_batch_end(self, *_: Any) -> None:
            self.kept = Logged(self.trainer).sums()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    kept: dict[str, Any] = {}
    for values in [VALUES[:2], VALUES[2:]] if continues else [VALUES]:
        module = Regression(kept)
        fit(module, values, directory)
        kept = module.kept
    return module.trainer.callback_metrics["value"].item()


def fit(module: Any, values: list[float], directory: Path) -> None:
    """Train for an epoch with batches of one value."""
    import lightning
    from torch.utils.data import DataLoader

    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        default_root_dir=directory,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(torch.tensor(values)[:, None], batch_size=1))


@pytest.mark.parametrize(
    "options",
    [
        {"reduce_fx": max},
        {"reduce_fx": min},
        {"reduce_fx": sum},
        {"reduce_fx": torch.max},
        {"reduce_fx": "avg"},
        {"add_dataloader_idx": False},
    ],
    ids=["max", "min", "sum", "torch.max", "avg", "add_dataloader_idx"],
)
def test_an_epoch_that_continues_logs_what_a_whole_one_does(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    assert logged(tmp_path, options, continues=True) == logged(tmp_path, options, continues=False)


def states(directory: Path, late: list[float], **options: Any) -> list[KeptState]:
    """What a rank keeps that logs a value after each step."""
    import lightning

    from polytrain_torch.lightning.private import Logged

    found = []

    class Regression(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def keep(self, point: int, *, is_forecast: bool) -> None:
            own = {"logged": Logged(self.trainer).kept()}
            found.append(small_state("", own, point=point, is_forecast=is_forecast))

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            self.keep(index + 2, is_forecast=True)
            return self.layer(batch).sum()

        def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
            self.log("late", late[index], on_step=False, on_epoch=True, **options)
            self.keep(index + 2, is_forecast=False)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    fit(Regression(), late, directory)
    return found


@pytest.mark.parametrize("reduction", ["mean", "sum", "max"])
@pytest.mark.parametrize("are_alike", [False, True])
def test_what_a_lost_rank_would_have_logged_is_known_only_if_ranks_log_alike(
    tmp_path: Path, reduction: str, are_alike: bool
) -> None:
    """Its last step hasn't ended. Adding 0 leaves this rank's sum as it was."""
    mine = states(tmp_path, [0.0] * 3, reduce_fx=reduction)
    lost = states(tmp_path, [0.0 if are_alike else 1.0] * 3, reduce_fx=reduction)[:-1]
    point = mine[-1].point
    ranks = KeptByRank(
        {0: mine, 1: lost},
        first=point,
        point=point,
        mine=0,
        buffers=[],
        sent=set(),
        needs_own=True,
    )
    if are_alike:
        assert ranks.state(1)[0]["own"] == ranks.state(0)[0]["own"]
    else:
        with pytest.raises(NotCleanError, match="what it had alone isn't known"):
            ranks.state(1)
