"""Estimates the initial score from all ranks' rows, in one process.

If the ranks estimated it together, its last bits would depend on how the rows are split.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import xgboost

from polytrain_xgboost.collective import Outside, Ranks

OF_COLUMNS = ("monotone_constraints", "interaction_constraints", "max_bin")
"""Parameters that refer to features or bins, left out for a model without features."""

_FLAG = b"boost_from_averageSL\0\0\0\0\0\0\0\1"
"""The bytes before the flag in a model's UBJSON: its name, the type "string" and the length 1."""


def estimated_intercept(
    facts: Mapping[str, Any], params: Mapping[str, Any], *, ranks: Ranks, outside: Outside
) -> str:
    """Return XGBoost's `base_score` for all ranks' rows.

    Args:
        facts: argument of `xgboost.DMatrix`, such as "label" → its array for this rank's rows.
        params: XGBoost's parameters.
        ranks: all ranks, which all call this function.
        outside: makes calls outside the collective.
    """
    # Convert to the types that XGBoost stores.
    by_rank = ranks.gathered({name: _as_kept(values) for name, values in facts.items()})
    estimate = None
    if ranks.me == 0:
        whole = {name: np.concatenate([theirs[name] for theirs in by_rank]) for name in facts}
        estimate = outside(_estimate, whole, params)
    intercept: str = ranks.broadcast(estimate)
    return intercept


def _as_kept(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return values.astype(np.float32 if values.dtype.kind == "f" else values.dtype)


def _estimate(facts: Mapping[str, Any], params: Mapping[str, Any]) -> str:
    """Let XGBoost estimate the score, by a round that finds nothing to split."""
    rows = len(next(iter(facts.values())))
    nothing = np.zeros((rows, 1), np.float32)
    matrix = xgboost.QuantileDMatrix(nothing, **facts)
    booster = xgboost.Booster(
        {name: value for name, value in params.items() if name not in OF_COLUMNS}, [matrix]
    )
    booster.update(matrix, 0)
    config = json.loads(booster.save_config())
    intercept: str = config["learner"]["learner_model_param"]["base_score"]
    return intercept


def of_each_output(given: Any, outputs: int) -> Any:
    """Return the user's `base_score` with a number for each score of a row.

    XGBoost refuses one number for several quantiles once it has loaded a model, and writes it
    into a model of several classes in another way then.

    Args:
        given: the parameter's value.
        outputs: how many scores each row has.
    """
    try:
        number = float(given)
    except (TypeError, ValueError):
        return given
    return given if outputs == 1 else json.dumps([number] * outputs)


def marked_as_estimated(model: bytes) -> bytes:
    """Mark the `base_score` in a saved model as estimated; XGBoost thinks that the user set it."""
    return model.replace(_FLAG + b"0", _FLAG + b"1", 1)
