"""Evaluates "train", whose rows are spread over all ranks.

Many metrics are means over rows or queries: the weighted mean of the ranks' means is exact. For the
others, such as "auc", rank 0 gathers all predictions, and LightGBM evaluates them in one process.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import lightgbm
import numpy as np
from lightgbm.basic import EvalResult

from polytrain.boosting.columns import Numbers, one_after_another
from polytrain_lightgbm.backend import LightGBM
from polytrain_lightgbm.collective import Collective
from polytrain_lightgbm.datasets import Rows
from polytrain_lightgbm.network import QUIET, by_itself
from polytrain_lightgbm.objectives import MULTICLASS, objective_of
from polytrain_lightgbm.parameters import PARAMETERS_OF_FEATURES, without

_MEANS_OF_ROWS = (
    *("l1", "l2", "rmse", "quantile", "huber", "fair", "poisson", "mape", "gamma", "tweedie"),
    *("binary_logloss", "binary_error", "multi_logloss", "multi_error"),
    *("cross_entropy", "kullback_leibler"),
)
_MEANS_OF_QUERIES = ("ndcg", "map")
_MEANS_BY_COUNT = ("cross_entropy_lambda",)
"""Sums over rows that LightGBM divides by the number of rows, whatever their weights."""

_ROWS, _QUERIES, _COUNT = range(3)
"""A rank's weights: that of its rows, that of its queries, and how many rows it has."""


def plain(result: EvalResult) -> EvalResult:
    """Return the result with a float and a bool, whatever types a user's metric has returned."""
    found, maximize = float(result.metric_value), bool(result.maximize)
    return EvalResult(result.dataset_name, result.metric_name, found, maximize)


def predictions_of(booster: lightgbm.Booster) -> Numbers:
    """Return a booster's predictions for its training rows, as LightGBM passes them to a metric."""
    found: list[Numbers] = []

    def keep(predictions: Numbers, _: Any) -> list[Any]:
        found.append(np.array(predictions))
        return []

    booster.eval_train(keep)
    return found[0]


class TrainMetrics:
    """Evaluates "train" after a round, with the same result on every rank."""

    def __init__(
        self, booster: lightgbm.Booster, options: LightGBM, rows: Rows, collective: Collective
    ) -> None:
        """
        Args:
            booster: this rank's booster, before its first round.
            collective: connects all ranks; each creates a `TrainMetrics`.
        """
        self._booster = booster
        self._options = options
        self._collective = collective
        self._rows = rows
        self._names = [each.metric_name for each in booster.eval_train()]
        self._at_once = [name for name in self._names if not _is_a_mean(name)]
        self._everybodys = _Everybody.gathered(rows, collective) if self._at_once else None

    def after_round(self) -> list[EvalResult]:
        """Return LightGBM's metrics, then the user's own, each over all ranks' rows."""
        rows = self._rows
        weights = (rows.row_weight, rows.query_weight, float(len(rows.table)))
        # The user's metrics aren't called for rows whose weights are all 0.
        feval = self._options.feval if rows.row_weight > 0 else None
        mine = [*map(plain, self._booster.eval_train(feval))]
        everybodys = self._collective.all_gather((mine, weights))
        counting = [(theirs, weights) for theirs, weights in everybodys if weights[0] > 0]
        exact = self._evaluated_at_once()
        together = []
        for index, one in enumerate(counting[0][0]):
            name, is_own = one.metric_name, index < len(self._names)
            if is_own and name in exact:
                found = exact[name]
            else:
                by = _weight_of(name) if is_own else _QUERIES
                found = _mean(name, [(r[index].metric_value, w[by]) for r, w in counting])
            together.append(EvalResult(one.dataset_name, name, found, one.maximize))
        return together

    def _evaluated_at_once(self) -> dict[str, float]:
        """Evaluate, on rank 0, the metrics that need all rows together."""
        if not self._at_once:
            return {}
        mine = predictions_of(self._booster)[self._rows.counting]
        predictions = self._collective.gather(mine)
        found = None
        if predictions is not None:
            assert self._everybodys is not None
            whole = np.concatenate(predictions)
            found = by_itself(self._everybodys.evaluated, whole, self._at_once, self._options)
        return dict(self._collective.broadcast(found))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Everybody:
    """Labels and weights of all ranks' rows with a weight above 0."""

    labels: Numbers
    weights: Numbers | None

    @classmethod
    def gathered(cls, rows: Rows, collective: Collective) -> _Everybody | None:
        """Gather labels and weights on rank 0. Return None on the others."""
        weights = None if rows.weights is None else rows.weights[rows.counting]
        parts = collective.gather((rows.labels[rows.counting], weights))
        if parts is None:
            return None
        labels, weights = map(one_after_another, zip(*parts, strict=True))
        return cls(labels=labels, weights=weights)

    def evaluated(
        self, predictions: Numbers, metrics: Sequence[str], options: LightGBM
    ) -> dict[str, float]:
        """Let LightGBM in one process evaluate the predictions of these rows."""
        params = {
            **without(
                options.params, (*PARAMETERS_OF_FEATURES, "objective", "metric", "tree_learner")
            ),
            # Without an objective, LightGBM uses initial scores as predictions.
            **{**QUIET, "objective": "none", "metric": [*metrics], "boosting": "gbdt"},
        }
        if "auc_mu" in metrics:
            # `auc_mu` compares raw scores of a row, so a constant for each row has no effect.
            predictions = _raw(predictions, options.params)
        data = lightgbm.Dataset(
            np.zeros((len(self.labels), 1)),
            label=self.labels,
            weight=self.weights,
            init_score=predictions,
            params={**params, "feature_pre_filter": False},
        )
        results = lightgbm.Booster(params, data).eval_train()
        return {each.metric_name: float(each.metric_value) for each in results}


def _raw(predictions: Numbers, params: Mapping[str, Any]) -> Numbers:
    """Convert multiclass predictions to raw scores, up to a constant for each row."""
    objective = objective_of(params)
    if objective not in MULTICLASS:
        return predictions
    chances = predictions.clip(np.finfo(float).tiny, 1 - np.finfo(float).eps)
    return np.log(chances) if objective == "multiclass" else np.log(chances / (1 - chances))


def _is_a_mean(metric: str) -> bool:
    """Whether a metric is a mean over rows or over queries (for `rmse`, its root)."""
    means = (*_MEANS_OF_ROWS, *_MEANS_BY_COUNT, *_MEANS_OF_QUERIES)
    return metric.partition("@")[0] in means


def _weight_of(metric: str) -> int:
    """Return which of a rank's weights a mean's is."""
    if metric in _MEANS_BY_COUNT:
        return _COUNT
    return _ROWS if metric in _MEANS_OF_ROWS else _QUERIES


def _mean(metric: str, parts: Sequence[tuple[float, float]]) -> float:
    """Return the weighted mean of the ranks' values."""
    if metric == "rmse":
        return math.sqrt(_mean("", [(value**2, weight) for value, weight in parts]))
    return sum(value * weight for value, weight in parts) / sum(weight for _, weight in parts)
