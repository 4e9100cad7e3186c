"""What a Transformers trainer adds up for its logs, over restarts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from polytrain_torch.transformers import private


def test_the_time_of_earlier_attempts_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """`train_steps_per_second` is of the steps of all attempts, so of the time of all, too."""
    now = 100.0
    monkeypatch.setattr(private, "time", SimpleNamespace(monotonic=lambda: now))

    def ends(trial: Any, rows: int, began: float) -> float:
        return now - began

    kept: dict[str, Any] = {}
    for trains_s, expected in ((7.0, 7.0), (2.0, 9.0), (0.0, 9.0)):
        trainer: Any = SimpleNamespace(_finalize_training=ends)
        sums, began = private.LogSums(trainer), now
        sums.begin()
        sums.restore(kept)
        now += trains_s
        assert trainer._finalize_training(None, 0, began) == expected
        kept = sums.kept()
        now += 100.0  # Until the next attempt
