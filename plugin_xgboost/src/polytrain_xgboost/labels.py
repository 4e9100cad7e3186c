"""The labels that XGBoost's objectives take."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polytrain.boosting.table_rules import Labels


def labels(params: Mapping[str, Any]) -> Labels | None:
    """Return the labels that the objective takes; None if no check is needed here."""
    objective = str(params.get("objective", "reg:squarederror"))
    if objective in ("binary:logistic", "binary:logitraw", "reg:logistic"):
        return Labels(objective=objective, low=0, high=1)
    if objective == "binary:hinge":
        return Labels(objective=objective, low=0, high=1, whole=True)
    if objective.startswith("multi:"):
        high = int(params["num_class"]) - 1
        return Labels(objective=objective, low=0, high=high, whole=True)
    if objective in ("count:poisson", "reg:tweedie"):
        return Labels(objective=objective, low=0)
    return None
