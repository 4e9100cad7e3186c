"""Early stopping by the metrics of a run's own."""

from __future__ import annotations

import numpy as np
import pytest
import xgboost

from polytrain_xgboost.backend import XGBoost
from polytrain_xgboost.evaluating import is_exhausted
from polytrain_xgboost.history import Score


@pytest.mark.parametrize("before", [Score("valid", "mae", 0.1), Score("other", "rmse", 0.1)])
def test_a_score_of_an_earlier_runs_metric_is_no_best_one(before: Score) -> None:
    rows = xgboost.DMatrix(np.zeros((2, 1)), label=[0, 1])
    booster, history = xgboost.train({}, rows, 1), []
    for scores in ([], [before], [Score("valid", "rmse", 3.0)], [Score("valid", "rmse", 4.0)]):
        history.append(scores)
        if scores:
            is_exhausted(booster, history, options=XGBoost(), patience=5)
    assert booster.attr("best_score") == "3.0"
