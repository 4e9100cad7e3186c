"""The random numbers that the order of a Transformers trainer's epoch depends on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from polytrain_torch.transformers.epoch_order import EpochOrder


def test_a_checkpoint_before_the_first_epoch_after_a_restart_has_those_of_the_last_one() -> None:
    trainer: Any = SimpleNamespace(train_dataset=[])
    order = EpochOrder(trainer, is_between_epochs=lambda: True)
    assert order.state() == {}
    saved = {"random": {"python": (3,)}, "order": None, "next": None}
    order.resume(saved)
    assert order.state() == saved
