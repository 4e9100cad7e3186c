"""The labels that LightGBM's objectives take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polytrain.boosting.table_validation import Labels
from polytrain_lightgbm.objectives import MULTICLASS, RANKING, objective_of
from polytrain_lightgbm.parameters import sets_something, value

_USUAL_GAINS = 31
"""Number of LightGBM's gains, one for each label from 0, if `label_gain` isn't given."""


def labels(params: Mapping[str, Any]) -> Labels | None:
    """Return the labels that the objective takes; None to skip the check."""
    objective = objective_of(params)
    if objective == "binary":
        return Labels(objective=objective, low=0, high=1, whole=True)
    if objective in MULTICLASS:
        high = int(value(params, "num_class")) - 1
        return Labels(objective=objective, low=0, high=high, whole=True)
    if objective in ("cross_entropy", "cross_entropy_lambda"):
        return Labels(objective=objective, low=0, high=1)
    if objective in ("gamma", "poisson", "tweedie"):
        return Labels(objective=objective, low=0)
    if objective == "lambdarank":
        highest = _highest_label(value(params, "label_gain"))
        return Labels(objective=objective, low=0, high=highest, whole=True)
    if objective in RANKING:
        return Labels(objective=objective, low=0, whole=True)
    return None


def _highest_label(gains: Any) -> float:
    if not sets_something(gains):
        return _USUAL_GAINS - 1
    # LightGBM reads all parameters from text.
    return len(gains.split(",") if isinstance(gains, str) else gains) - 1
