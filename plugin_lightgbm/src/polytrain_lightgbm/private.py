"""All uses of LightGBM's private names, which a newer version may rename.

The driver calls two of these functions, so importing this module doesn't import LightGBM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import lightgbm


def is_early_stopping(callback: Any) -> bool:
    """Return whether `lightgbm.early_stopping` made the callback; its class isn't public."""
    return type(callback).__name__ == "_EarlyStoppingCallback"


def is_recording(callback: Any) -> bool:
    """Return whether `lightgbm.record_evaluation` made the callback; its class isn't public."""
    return type(callback).__name__ == "_RecordEvaluationCallback"


def begin_record(callback: Any, env: lightgbm.callback.CallbackEnv) -> None:
    """Initialize a `record_evaluation` callback, which does so itself in round 0 only."""
    callback._init(env)


def merge(booster: lightgbm.Booster, other: lightgbm.Booster) -> None:
    """Insert copies of another booster's trees before a booster's own.

    `lightgbm.train(init_model=…)` does so too, but first it predicts every row.
    """
    from lightgbm.basic import _LIB, _safe_call

    _safe_call(_LIB.LGBM_BoosterMerge(booster._handle, other._handle))
