"""The labels that XGBoost's objectives take, and checks of label bounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from polytrain.boosting.columns import Gather, floats
from polytrain.boosting.table_validation import Found, Labels, Rule, refuse
from polytrain.extension import group_sizes
from polytrain_xgboost.backend import XGBoost
from polytrain_xgboost.parameters import is_true

_HIGHEST_RELEVANCE = 31
"""With exponential gains, XGBoost refuses higher ones."""


def labels(params: Mapping[str, Any]) -> Labels | None:
    """Return the labels that the objective takes; None to skip the check."""
    objective = str(params.get("objective", "reg:squarederror"))
    if objective in ("binary:logistic", "binary:logitraw", "reg:logistic"):
        return Labels(objective=objective, low=0, high=1)
    if objective == "binary:hinge":
        return Labels(objective=objective, low=0, high=1, whole=True)
    if objective.startswith("multi:"):
        high = int(params["num_class"]) - 1
        return Labels(objective=objective, low=0, high=high, whole=True)
    if objective == "reg:gamma":
        return Labels(objective=objective, low=0, above=True)
    if objective == "reg:squaredlogerror":
        return Labels(objective=objective, low=-1, above=True)
    if objective == "rank:map":
        return Labels(objective=objective, low=0, high=1, whole=True)
    if objective == "rank:ndcg" and is_true(params, "ndcg_exp_gain", default=True):
        return Labels(objective=objective, low=0, high=_HIGHEST_RELEVANCE, whole=True)
    if objective in ("count:poisson", "reg:tweedie", "survival:aft"):
        return Labels(objective=objective, low=0)
    return None


def refuse_uneven(tables: Mapping[str, pa.Table], options: XGBoost, *, gather: Gather) -> None:
    """Refuse queries whose rows differ in weight: XGBoost weighs queries. Every rank calls it.

    Raises:
        BadDataError: the same on every rank, if rows of any rank differ from their query's first.
    """
    assert options.qid is not None
    assert options.weight is not None
    differences = {}
    for name, table in tables.items():
        weights, sizes = floats(table.column(options.weight)), group_sizes(table[options.qid])
        first = np.repeat(weights[np.cumsum(sizes) - sizes], sizes)
        differences[name] = pa.table({options.weight: weights - first})
    rule = Rule(
        option="weight",
        column=options.weight,
        find=lambda column: Found(rows=int(np.count_nonzero(floats(column)))),
        what="isn't that of the first row of the query, and XGBoost takes one for each query",
        remedy="Give all rows of a query the same weight, or use LightGBM, which weighs each row",
    )
    refuse(differences, [rule], gather=gather)


def refuse_crossed(tables: Mapping[str, pa.Table], options: XGBoost, *, gather: Gather) -> None:
    """Refuse rows whose upper bound is below the lower bound. Every rank calls it.

    Raises:
        BadDataError: the same on every rank, if a row of any rank has such bounds.
    """
    low, high = options.labels.values()
    column = f"{high} - {low}"
    widths = {
        name: pa.table({column: floats(table.column(high)) - floats(table.column(low))})
        for name, table in tables.items()
    }
    rule = replace(
        Labels(objective="survival:aft", low=0).rule("label_upper_bound", column),
        what="is negative",
        remedy="Give an upper bound that isn't below the lower one",
    )
    refuse(widths, [rule], gather=gather)
