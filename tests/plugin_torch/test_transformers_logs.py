"""What a Hugging Face trainer's callback reports of its logs."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import TrainerControl, TrainerState

from polytrain_torch.transformers import trainer
from polytrain_torch.transformers.trainer import ReportCallback


def test_logs_after_a_checkpoint_are_reported_without_prepare_trainer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reported: list[Any] = []
    monkeypatch.setattr(trainer, "report_part", lambda metrics, part: reported.append(metrics))
    # It knows no call of train(): the checkpoint may be the one that it has reported itself.
    monkeypatch.setattr(trainer, "_has_trained", lambda: True)
    ReportCallback().on_log(None, TrainerState(), TrainerControl(), {"loss": 1.0})
    assert reported == [{"loss": 1.0}]
