"""The score that every row begins with, estimated from all rows as one process would.

Where the ranks estimate it together, it depends in its last bits on how the rows are split.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import xgboost

from polytrain_xgboost.collecting import Ranks
from polytrain_xgboost.outside import Outside

_OF_COLUMNS = ("monotone_constraints", "interaction_constraints", "max_bin")
"""Parameters about features: the estimate has none of the user's, and nothing to bin."""

_FLAG = b"boost_from_averageSL\0\0\0\0\0\0\0\1"
"""What precedes the flag in a model's UBJSON: its name, and that a string of length 1 follows."""


def estimated_intercept(
    facts: Mapping[str, Any], params: Mapping[str, Any], *, ranks: Ranks, outside: Outside
) -> str:
    """XGBoost's `base_score` for all rows.

    Args:
        facts: what `xgboost.DMatrix` takes beside the features, of this rank's rows.
        params: XGBoost's parameters.
        ranks: all of which call this.
        outside: for what one rank does alone.
    """
    # As XGBoost keeps them.
    everybodys = ranks.gathered({name: _as_kept(values) for name, values in facts.items()})
    estimate = None
    if ranks.me == 0:
        whole = {name: np.concatenate([theirs[name] for theirs in everybodys]) for name in facts}
        estimate = outside(_estimate, whole, params)
    intercept: str = ranks.told(estimate)
    return intercept


def _as_kept(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return values.astype(np.float32 if values.dtype.kind == "f" else values.dtype)


def _estimate(facts: Mapping[str, Any], params: Mapping[str, Any]) -> str:
    """XGBoost estimates before the first round, which finds nothing to split here."""
    nothing = np.zeros((len(facts["label"]), 1), np.float32)
    matrix = xgboost.QuantileDMatrix(nothing, **facts)
    booster = xgboost.Booster(
        {name: value for name, value in params.items() if name not in _OF_COLUMNS}, [matrix]
    )
    booster.update(matrix, 0)
    config = json.loads(booster.save_config())
    intercept: str = config["learner"]["learner_model_param"]["base_score"]
    return intercept


def marked_as_estimated(model: bytes) -> bytes:
    """A model whose `base_score` was given says so. One that we have given was estimated."""
    return model.replace(_FLAG + b"0", _FLAG + b"1", 1)
