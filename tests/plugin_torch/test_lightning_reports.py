"""All ranks report an epoch, or none does: their reports are counted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest


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
    epoch.steps = (6, False), (6, False), False
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
    epoch.steps = (6, True), (6, False), has_validated
    epoch.report_epoch(SimpleNamespace(global_step=6, current_epoch=0, callback_metrics={}))
    assert made == []
