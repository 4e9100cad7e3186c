"""Evaluation after a boosting round, and early stopping."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import xgboost

from polytrain_xgboost.backend import XGBoost
from polytrain_xgboost.collecting import Ranks
from polytrain_xgboost.history import Score
from polytrain_xgboost.matrices import TrainingData
from polytrain_xgboost.outside import Outside

# Prefixes of the names of metrics to maximize; all others are losses.
_MAXIMIZED = ("auc", "aucpr", "pre", "map", "ndcg")

Metric = Callable[[Any, xgboost.DMatrix], Any]
"""A user's metric: predictions and a matrix to name and value, or to a list of these."""


def evaluated(
    booster: xgboost.Booster,
    data: TrainingData,
    *,
    round_: int,
    options: XGBoost,
    ranks: Ranks,
    outside: Outside,
) -> list[Score]:
    """Return the metrics of a round, "train" first; the same on every rank.

    Rank 0 has all rows of the other data sets, so its metrics equal those of one process. Each rank
    has its part of "train". XGBoost combines its own metrics; the user's metric is averaged by
    weight.
    """
    found: list[Score] = []
    custom = None if options.custom_metric is None else _Custom(options)
    if options.eval_train:
        of_train = (booster, data.train, "train", round_)
        # XGBoost refuses the metric of survival:cox in a collective, one of a single rank too.
        found += outside(_own, *of_train) if ranks.size == 1 else _own(*of_train)
        if custom is not None:
            weight = float(data.weights.sum(dtype=float))
            mine = custom.scores(booster, data.train, "train") if weight > 0 else []
            found += _mean(ranks.gathered((mine, weight)))

    def others() -> list[Score]:
        scores = []
        for name, matrix in data.evaluated.items():
            scores += _own(booster, matrix, name, round_)
            if custom is not None:
                scores += custom.scores(booster, matrix, name)
        return scores

    if data.has_others:
        found += ranks.broadcast(outside(others) if ranks.me == 0 else None)
    return found


class _Custom:
    """The user's own metric, by XGBoost's rules."""

    def __init__(self, options: XGBoost) -> None:
        assert options.custom_metric is not None
        self._metric: Metric = options.custom_metric
        # With the user's objective, XGBoost can't convert scores to predictions.
        self._margin = options.obj is not None

    def scores(self, booster: xgboost.Booster, matrix: xgboost.DMatrix, name: str) -> list[Score]:
        """Return one data set's metrics in full precision: XGBoost itself keeps six decimals."""
        predictions = booster.predict(matrix, training=False, output_margin=self._margin)
        found = self._metric(predictions, matrix)
        pairs = found if isinstance(found, list) else [found]
        return [Score(name, metric, float(value)) for metric, value in pairs]


def _own(booster: xgboost.Booster, matrix: xgboost.DMatrix, name: str, round_: int) -> list[Score]:
    """Return XGBoost's metrics of one data set."""
    text = booster.eval_set([(matrix, name)], round_)
    # The round's number, and "name-metric:value" for every metric.
    parts = (part.rpartition(":") for part in text.split("\t")[1:])
    return [Score(name, full.removeprefix(f"{name}-"), float(value)) for full, _, value in parts]


def _mean(parts: Iterable[tuple[list[Score], float]]) -> list[Score]:
    """Return the mean of the ranks' metrics by the weight of their rows, which may be 0."""
    parts = [(scores, weight) for scores, weight in parts if weight > 0]
    total = sum(weight for _, weight in parts)
    return [
        one._replace(value=sum(scores[i].value * weight for scores, weight in parts) / total)
        for i, one in enumerate(parts[0][0])
    ]


def is_exhausted(
    booster: xgboost.Booster, history: list[list[Score]], *, options: XGBoost, patience: int
) -> bool:
    """Return whether the last metric hasn't improved for `patience` rounds, by XGBoost's rule.

    The state is in the model's attributes, so a restart resumes with it.

    Args:
        booster: the booster after a round.
        history: the metrics of this and all earlier rounds.
        options: the run's options.
        patience: rounds to wait.

    Raises:
        ValueError: there are no metrics.
    """
    if not history[-1]:
        raise ValueError(
            "early_stopping_rounds needs a metric, and there is none. Leave out "
            "'disable_default_eval_metric', or give params['eval_metric'] or custom_metric."
        )
    _, metric, score = history[-1][-1]
    maximize = options.maximize
    if maximize is None:
        # "mape" is a loss, although its name starts with that of "map".
        maximize = metric.startswith(_MAXIMIZED) and metric != "mape"
    # The attributes of the user's model are about other data.
    best = booster.attr("best_score") if len(history) > 1 else None
    if best is None or (score > float(best) if maximize else score < float(best)):
        iteration = booster.num_boosted_rounds() - 1
        booster.set_attr(best_score=repr(score), best_iteration=str(iteration))
    return has_stopped(booster, patience)


def has_stopped(booster: xgboost.Booster, patience: int) -> bool:
    """Return whether early stopping ends training with this model."""
    stale = booster.num_boosted_rounds() - 1 - int(booster.attr("best_iteration") or 0)
    return stale >= patience
