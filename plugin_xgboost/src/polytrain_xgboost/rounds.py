"""A boosting round, and its random draws.

A round's draws depend only on the seed and the round's number, so a restart doesn't change them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import xgboost

from polytrain.boosting.sampling import Mask, Objective, drawn, of_rows
from polytrain_xgboost.backend import XGBoost
from polytrain_xgboost.matrices import TrainingData

_LEAST_HESSIAN = np.float32(1e-16)
"""XGBoost's own, of a row and class in its objectives for several classes."""

_BLOCK = 1 << 16
"""Rows whose gradients are computed at once: each takes several times the room of its result."""

_COLUMN_DRAWS = ("colsample_bytree", "colsample_bylevel", "colsample_bynode")


def boost(
    booster: xgboost.Booster,
    data: TrainingData,
    *,
    round_: int,
    options: XGBoost,
    params: Mapping[str, Any],
) -> None:
    """Grow the trees of a round.

    XGBoost draws rows by their numbers on the rank, so its model depends on how rows are split.
    Here rows are drawn by their numbers in the whole data set; the others get weight 0.

    Args:
        booster: the booster to add trees to.
        round_: number of the round, from 0, counting rounds of the user's model.
        params: XGBoost's parameters.
    """
    if any(float(params.get(name, 1)) != 1 for name in _COLUMN_DRAWS):
        _reset_column_draws(booster, params["tree_method"])
    objective: Objective | None = options.obj
    mask = drawn_rows(data, round_, options, params)
    if mask is not None and objective is not None:
        objective = of_rows(objective, data.by_row(mask), order="C")
    elif mask is not None and options.has_several_classes:
        objective = softmax_of(mask, classes=int(params["num_class"]))
    if objective is not None and params.get("booster") == "dart":
        # DART drops trees before XGBoost sets the round's seed.
        booster.set_param({"seed": options.seed + round_})
    if mask is None or objective is not None:
        booster.update(data.train, round_, objective)
        return
    weights = data.weights
    data.train.set_weight(weights * mask)
    booster.update(data.train, round_)
    # Metrics use all rows.
    data.train.set_weight(weights)


def drawn_rows(
    data: TrainingData, round_: int, options: XGBoost, params: Mapping[str, Any]
) -> Mask | None:
    """Return a mask of the rank's rows (or queries) that a round uses; None if it uses all.

    Args:
        params: XGBoost's parameters, and `subsample` if a callback has set it.
    """
    rate = float(params.get("subsample", options.row_rate))
    if rate == 1:
        return None
    return drawn(
        rate,
        seed=options.seed,
        round_=round_,
        first=data.first_row,
        rows=len(data.weights),
    )


def softmax_of(rows: Mask, *, classes: int) -> Objective:
    """Return XGBoost's objective for several classes, of the drawn rows.

    XGBoost's own gives a row of weight 0 a tiny hessian. Sums with these are rounded, so their last
    bits would depend on how rows are split.

    Args:
        rows: mask of the drawn rows, of shape `[rows]`.
        classes: number of classes.
    """

    def objective(scores: np.ndarray[Any, Any], train: xgboost.DMatrix) -> tuple[Any, Any]:
        labels, weights = train.get_label(), train.get_weight()
        scores = scores.reshape(len(labels), classes)
        gradients = np.zeros(scores.shape, np.float32)
        hessians = np.zeros(scores.shape, np.float32)
        for begin in range(0, len(labels), _BLOCK):
            at = begin + np.flatnonzero(rows[begin : begin + _BLOCK])
            weight = weights[at] if len(weights) else np.ones(len(at), np.float32)
            gradients[at], hessians[at] = _softmax(scores[at], labels[at], weight)
        return gradients, hessians

    return objective


def _softmax(scores: Any, labels: Any, weights: Any) -> tuple[Any, Any]:
    """Return gradients and hessians, both of shape `[rows, classes]`."""
    powers = np.exp(scores.astype(np.float64) - scores.max(axis=1, keepdims=True))
    chances = (powers / powers.sum(axis=1, keepdims=True)).astype(np.float32)
    weights = weights[:, np.newaxis]
    wanted = labels[:, np.newaxis] == np.arange(scores.shape[1])
    hessians = np.maximum(2 * chances * (1 - chances) * weights, _LEAST_HESSIAN)
    return (chances - wanted.astype(np.float32)) * weights, hessians


def _reset_column_draws(booster: xgboost.Booster, method: str) -> None:
    """Make the next round's column draws depend only on the seed and the round's number.

    The updater's generator continues from round to round and isn't in the model. Setting another
    method and then the old one again makes XGBoost create a new updater.
    """
    booster.set_param({"tree_method": "approx"})
    booster.save_config()
    booster.set_param({"tree_method": method})
