"""All ranks report an epoch, or none does: their reports are counted."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.plugin_torch.conftest import Run


@pytest.mark.parametrize("any_rank_has_means", [True, False])
def test_all_ranks_report_means_that_one_has_logged(
    monkeypatch: pytest.MonkeyPatch, any_rank_has_means: bool
) -> None:
    from polytrain_torch.lightning import reports

    made: list[dict[str, Any]] = []
    own = SimpleNamespace(are_of_epochs=False)
    monkeypatch.setattr(reports, "Logged", lambda trainer: own)
    monkeypatch.setattr(reports, "any_rank", lambda own: own or any_rank_has_means)
    monkeypatch.setattr(reports, "report", made.append)
    epoch = reports.Reports()
    # A checkpoint within the last batch has made a report.
    epoch.steps = (6, False), (6, False), False, False
    trainer = SimpleNamespace(global_step=6, current_epoch=0, callback_metrics={})
    epoch.report_epoch(trainer)
    assert made == ([{"epoch": 0, "step": 6}] if any_rank_has_means else [])


@pytest.mark.parametrize("has_validated", [True, False])
def test_a_checkpoint_after_the_validation_has_reported_an_epoch_without_means(
    monkeypatch: pytest.MonkeyPatch, has_validated: bool
) -> None:
    from polytrain_torch.lightning import reports

    made: list[dict[str, Any]] = []
    monkeypatch.setattr(reports, "Logged", lambda trainer: SimpleNamespace(are_of_epochs=False))
    monkeypatch.setattr(reports, "any_rank", bool)
    monkeypatch.setattr(reports, "report", made.append)
    epoch = reports.Reports()
    # A restart skips the validation, so only the first attempt knows of it.
    epoch.steps = (6, True), (6, False), has_validated, False
    epoch.report_epoch(SimpleNamespace(global_step=6, current_epoch=0, callback_metrics={}))
    assert made == []


def test_a_restart_reports_an_epoch_whose_only_values_are_of_torchmetrics(
    run: Run, tmp_path: Path
) -> None:
    """Such a metric begins anew: only the first attempt knows that the epoch has one."""

    def train(*, stops: bool) -> None:
        import lightning
        import torch
        import torchmetrics
        from lightning.pytorch.callbacks import ModelCheckpoint
        from torch.utils.data import DataLoader, TensorDataset

        from polytrain_torch.lightning import Trainer

        class Regression(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.layer = torch.nn.Linear(3, 1)
                self.mean = torchmetrics.MeanMetric()

            def training_step(self, batch: Any, index: int) -> torch.Tensor:
                loss = self.layer(batch[0]).square().mean()
                if self.current_epoch == 0:
                    self.mean(loss)
                    self.log("mean", self.mean, on_step=False, on_epoch=True)
                return loss

            def on_train_epoch_end(self) -> None:
                if stops:
                    raise InterruptedError

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=0.1)

        trainer = Trainer(
            max_epochs=2,
            default_root_dir=str(tmp_path),
            logger=False,
            enable_model_summary=False,
            callbacks=[ModelCheckpoint(every_n_train_steps=2)],
        )
        rows = TensorDataset(torch.ones(4, 3))
        with contextlib.suppress(InterruptedError):
            trainer.fit(Regression(), DataLoader(rows, batch_size=2))

    def steps(result: Any) -> list[int]:
        return [each["step"] for each in result.history]

    undisturbed = run(partial(train, stops=False))
    first = run(partial(train, stops=True))
    second = run(partial(train, stops=False), restore_from=first.checkpoint)
    # At each epoch's last step, one with its checkpoint and one with its metric.
    assert steps(undisturbed) == [2, 2, 4, 4]
    assert steps(first) + steps(second) == steps(undisturbed)
