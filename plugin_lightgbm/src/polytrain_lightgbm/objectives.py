"""The names of LightGBM's objectives and metrics, and the options that an objective needs.

This module doesn't import LightGBM, which would ignore an unknown metric.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from polytrain.boosting.problems import is_at_least, needed_by_objective, parameter_problem
from polytrain_lightgbm.parameters import sets_something, value
from polytrain_plugins import Problem, unknown_name

_OBJECTIVES: dict[str, tuple[str, ...]] = {
    "binary": (),
    "cross_entropy": ("xentropy",),
    "cross_entropy_lambda": ("xentlambda",),
    "fair": (),
    "gamma": (),
    "huber": (),
    "lambdarank": (),
    "mape": ("mean_absolute_percentage_error",),
    "multiclass": ("softmax",),
    "multiclassova": ("multiclass_ova", "ova", "ovr"),
    "poisson": (),
    "quantile": (),
    "rank_xendcg": ("xendcg", "xe_ndcg", "xe_ndcg_mart", "xendcg_mart"),
    "regression": (
        *("regression_l2", "l2", "mean_squared_error", "mse"),
        *("l2_root", "root_mean_squared_error", "rmse"),
    ),
    "regression_l1": ("l1", "mean_absolute_error", "mae"),
    "tweedie": (),
}
_NAMES = {each: name for name, others in _OBJECTIVES.items() for each in (name, *others)}

MULTICLASS = ("multiclass", "multiclassova")
RANKING = ("lambdarank", "rank_xendcg")
PERCENTILES = ("mape", "quantile", "regression_l1")
"""Objectives whose leaves are percentiles of residuals."""

_METRICS = (
    *("auc", "auc_mu", "average_precision", "binary_error", "binary_logloss"),
    *("cross_entropy", "cross_entropy_lambda", "fair", "gamma", "gamma_deviance", "huber"),
    *("kldiv", "kullback_leibler", "map", "mean_average_precision", "multi_error"),
    *("multi_logloss", "ndcg", "r2", "xentlambda", "xentropy"),
    *("custom", "na", "none", "null"),
)
"""Metrics besides the names of objectives, which are also names of metrics."""


def objective_of(params: Mapping[str, Any]) -> str | None:
    """Return the objective's main name in LightGBM; None for a function or an unknown name."""
    given = value(params, "objective", "regression")
    return _NAMES.get(given.lower()) if isinstance(given, str) else None


def objective_problems(params: Mapping[str, Any], group: str | None) -> Iterator[Problem]:
    """Yield the problems of the objective and of the metrics.

    Args:
        params: the user's parameters.
        group: the option `group`.
    """
    objective = value(params, "objective", "regression")
    if not callable(objective):
        yield from unknown_name(
            "params['objective']", str(objective).lower(), _NAMES, "LightGBM's objectives"
        )
    for metric in _metrics(value(params, "metric", ())):
        known = {*_NAMES, *_METRICS}
        yield from unknown_name("params['metric']", metric.lower(), known, "LightGBM's metrics")
    known_as = objective_of(params)
    if known_as in PERCENTILES and sets_something(value(params, "monotone_constraints")):
        yield parameter_problem(
            "monotone_constraints",
            f"LightGBM has none with the objective {objective!r}, whose leaves are percentiles",
            "Leave one of them out; or use XGBoost, or the objective 'huber'",
        )
    if known_as in MULTICLASS and not is_at_least(value(params, "num_class"), 2):
        yield needed_by_objective(
            str(objective), "params['num_class']", "Give the number of classes, 2 or more"
        )
    if known_as not in (None, *MULTICLASS) and is_at_least(value(params, "num_class"), 2):
        yield parameter_problem(
            "num_class",
            f"LightGBM takes one class with the objective {objective!r}",
            "Leave it out, or use the objective 'multiclass'",
        )
    if known_as in RANKING and group is None:
        yield needed_by_objective(
            str(objective), "group", "Name the column that tells the query of a row"
        )


def has_several_outputs(params: Mapping[str, Any]) -> bool:
    """Return whether the objective gives each row several scores: one for each class."""
    return objective_of(params) in MULTICLASS or is_at_least(value(params, "num_class"), 2)


def _metrics(given: Any) -> Iterable[str]:
    """Return the metrics' names, from a list or from text with commas."""
    if isinstance(given, str):
        return [each.strip() for each in given.split(",") if each.strip()]
    if not isinstance(given, Iterable):
        return []
    return [each for each in given if isinstance(each, str) and each]
