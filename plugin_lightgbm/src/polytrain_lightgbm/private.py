"""The private names of LightGBM that polytrain uses, each with the reason.

What a newer version may rename stands here alone. The driver uses two of them, so importing this
module doesn't import LightGBM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import lightgbm


def is_early_stopping(callback: Any) -> bool:
    """Return whether `lightgbm.early_stopping` made it; the class has no public name."""
    return type(callback).__name__ == "_EarlyStoppingCallback"


def is_recording(callback: Any) -> bool:
    """Return whether `lightgbm.record_evaluation` made it; the class has no public name."""
    return type(callback).__name__ == "_RecordEvaluationCallback"


def begin_record(callback: Any, env: lightgbm.callback.CallbackEnv) -> None:
    """Have such a callback begin with a round that isn't 0: by itself it begins in round 0 only."""
    callback._init(env)


def merge(booster: lightgbm.Booster, other: lightgbm.Booster) -> None:
    """Insert copies of another booster's trees before a booster's own.

    `lightgbm.train(init_model=…)` does so too, but it predicts every row in Python first.
    """
    from lightgbm.basic import _LIB, _safe_call

    _safe_call(_LIB.LGBM_BoosterMerge(booster._handle, other._handle))
