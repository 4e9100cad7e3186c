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


def field_of(dataset: lightgbm.Dataset, name: str) -> Any:
    """Return the memory of a field of float32 numbers, shape `[rows]`; None without the field.

    A booster reads it in every round. Setting the field, as `set_field` does, would also compute
    the weights of queries anew, elsewhere: ranking metrics would read memory that was freed.
    """
    import ctypes

    import numpy as np
    from lightgbm.basic import _LIB, _c_str, _safe_call

    rows, kind, place = ctypes.c_int(), ctypes.c_int(), ctypes.POINTER(ctypes.c_float)()
    found = map(ctypes.byref, (rows, place, kind))
    _safe_call(_LIB.LGBM_DatasetGetField(dataset._handle, _c_str(name), *found))
    return np.ctypeslib.as_array(place, (rows.value,)) if rows.value else None


def merge(booster: lightgbm.Booster, other: lightgbm.Booster) -> None:
    """Insert copies of another booster's trees before a booster's own.

    `lightgbm.train(init_model=…)` does so too, but first it predicts every row.
    """
    from lightgbm.basic import _LIB, _safe_call

    _safe_call(_LIB.LGBM_BoosterMerge(booster._handle, other._handle))
