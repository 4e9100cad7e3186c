"""Adapts objectives and metrics of XGBoost's estimators to `xgboost.train`."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import xgboost

Function = Callable[..., Any]


def objective_of_rows(function: Function) -> Function:
    """Convert an objective of labels and scores to one of scores and matrix.

    Args:
        function: takes labels, scores and, optionally, `sample_weight`.
    """
    takes_weights = "sample_weight" in signature(function).parameters

    def gradients(scores: Any, rows: xgboost.DMatrix) -> Any:
        if (weights := _weights(rows)) is None:
            return function(rows.get_label(), scores)
        if not takes_weights:
            raise ValueError(
                "There are sample weights, and the objective has no argument sample_weight. Add it"
            )
        return function(rows.get_label(), scores, sample_weight=weights)

    return gradients


def metric_of_rows(function: Function) -> Function:
    """Convert a metric of labels and predictions to one of predictions and matrix.

    Args:
        function: takes labels, predictions and, if there are weights, `sample_weight`.
    """

    def metric(predictions: Any, rows: xgboost.DMatrix) -> tuple[str, float]:
        weights = _weights(rows)
        beside = {} if weights is None else {"sample_weight": weights}
        name: str = getattr(function, "__name__", type(function).__name__)
        return name, function(rows.get_label(), predictions, **beside)

    return metric


def _weights(rows: xgboost.DMatrix) -> Any:
    """Return the rows' weights; None if all are 1, as they are if only this package set them."""
    weights = rows.get_weight()
    return weights if (weights != 1).any() else None
