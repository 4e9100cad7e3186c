"""A boosting round, and what is drawn for it.

Every round draws from the seed and its own number alone. So one that comes after a restart is the
one that would have come without.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import xgboost

from polytrain.boosting.row_draws import Mask, drawn
from polytrain_xgboost.backend import XGBoost
from polytrain_xgboost.matrices import TrainingData

_COLUMN_DRAWS = ("colsample_bytree", "colsample_bylevel", "colsample_bynode")

Objective = Callable[[Any, xgboost.DMatrix], tuple[Any, Any]]
"""An objective of the user's: scores and a matrix to gradient and hessian, by row."""


def boost(
    booster: xgboost.Booster,
    data: TrainingData,
    *,
    round_: int,
    options: XGBoost,
    params: Mapping[str, Any],
) -> None:
    """Grow the trees of a round.

    XGBoost would draw rows by their numbers on the rank: another model for every way to split them.
    These are drawn by their numbers in the whole data set; one that isn't counts for nothing.

    Args:
        booster: whose trees.
        data: this rank's.
        round_: number of the round, from 0, those of a model that was given included.
        options: of the run.
        params: XGBoost's.
    """
    if any(float(params.get(name, 1)) != 1 for name in _COLUMN_DRAWS):
        _forget_column_draws(booster, params["tree_method"])
    objective: Objective | None = options.obj
    if objective is not None and params.get("booster") == "dart":
        # It drops trees before XGBoost itself seeds the round.
        booster.set_param({"seed": options.seed + round_})
    if options.row_rate == 1:
        booster.update(data.train, round_, objective)
        return
    weights = data.weights
    mask = drawn(
        options.row_rate,
        seed=options.seed,
        round_=round_,
        first=data.first_row,
        rows=len(weights),
    )
    if objective is not None:
        # Its gradients needn't heed weights.
        booster.update(data.train, round_, _of_rows(objective, data.by_row(mask)))
        return
    data.train.set_weight(weights * mask)
    booster.update(data.train, round_)
    # Metrics are over all rows.
    data.train.set_weight(weights)


def _of_rows(objective: Objective, rows: Mask) -> Objective:
    """An objective that only some rows have a part in."""

    def partial(scores: Any, train: xgboost.DMatrix) -> tuple[Any, Any]:
        found = (np.asarray(each) for each in objective(scores, train))
        gradient, hessian = (each * rows.reshape(-1, *[1] * (each.ndim - 1)) for each in found)
        return gradient, hessian

    return partial


def _forget_column_draws(booster: xgboost.Booster, method: str) -> None:
    """Have the next round draw its columns anew, from the seed and its number.

    What grows trees has a generator of its own, which resumes from round to round and isn't in the
    model. Another method, and back again, makes XGBoost build a new one.
    """
    booster.set_param({"tree_method": "approx"})
    booster.save_config()
    booster.set_param({"tree_method": method})
