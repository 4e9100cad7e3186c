"""Evaluates the model after a boosting round, and decides on early stopping."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import xgboost

from polytrain_xgboost.backend import XGBoost
from polytrain_xgboost.collective import Outside, Ranks
from polytrain_xgboost.history import Score
from polytrain_xgboost.intercept import OF_COLUMNS
from polytrain_xgboost.matrices import TrainingData

# Name prefixes of metrics to maximize; all other metrics are minimized.
_MAXIMIZED = ("auc", "aucpr", "pre", "map", "ndcg")

Metric = Callable[[Any, xgboost.DMatrix], Any]
"""A user's metric: takes predictions and a matrix, returns (name, value) or a list of these."""


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

    Rank 0 has all rows of the other data sets, so their metrics equal those of one process. Each
    rank has a part of "train". XGBoost combines its own metrics, except those that need all rows
    together. The user's metric is averaged by weight.
    """
    found: list[Score] = []
    custom = None if options.custom_metric is None else _Custom(options)
    if options.eval_train:
        of_train = (booster, data.train, "train", round_)
        # In a collective, even of one rank, XGBoost refuses the metric of "survival:cox".
        own = outside(_own, *of_train) if ranks.size == 1 else _own(*of_train)
        at_once = [each.metric for each in own if _needs_all_rows(each.metric, options)]
        if at_once and ranks.size > 1:
            exact = _of_all_rows(booster, data.train, at_once, options, ranks, outside)
            own = [each._replace(value=exact.get(each.metric, each.value)) for each in own]
        found += own
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
    """Evaluates the user's own metric by XGBoost's rules."""

    def __init__(self, options: XGBoost) -> None:
        assert options.custom_metric is not None
        self._metric: Metric = options.custom_metric
        # With the user's objective, XGBoost can't convert scores to predictions.
        self._margin = options.obj is not None

    def scores(self, booster: xgboost.Booster, matrix: xgboost.DMatrix, name: str) -> list[Score]:
        """Return one data set's metrics in full precision; XGBoost itself keeps six decimals."""
        predictions = booster.predict(matrix, training=False, output_margin=self._margin)
        found = self._metric(predictions, matrix)
        pairs = found if isinstance(found, list) else [found]
        return [Score(name, metric, float(value)) for metric, value in pairs]


def _own(booster: xgboost.Booster, matrix: xgboost.DMatrix, name: str, round_: int) -> list[Score]:
    """Return XGBoost's metrics of one data set."""
    text = booster.eval_set([(matrix, name)], round_)
    # Tab-separated: the round's number, then "name-metric:value" for every metric.
    parts = (part.rpartition(":") for part in text.split("\t")[1:])
    return [Score(name, full.removeprefix(f"{name}-"), float(value)) for full, _, value in parts]


def _needs_all_rows(metric: str, options: XGBoost) -> bool:
    """Return whether XGBoost's combination of the ranks' metrics differs from that of all rows."""
    return options.qid is None and metric.partition("@")[0] in ("auc", "aucpr", "pre")


def _of_all_rows(
    booster: xgboost.Booster,
    train: xgboost.DMatrix,
    metrics: list[str],
    options: XGBoost,
    ranks: Ranks,
    outside: Outside,
) -> dict[str, float]:
    """Let XGBoost on rank 0 evaluate all ranks' scores; return the metrics on every rank."""
    weights = train.get_weight()
    # Drop rows of weight 0: with a class of only such rows, `aucpr` would be NaN.
    counting = weights > 0 if len(weights) else slice(None)
    scores = booster.predict(train, training=False, output_margin=True)[counting]
    mine = scores, train.get_label()[counting], weights[counting]
    by_rank = ranks.gathered(mine)

    def evaluate() -> dict[str, float]:
        scores, labels, weights = map(np.concatenate, zip(*by_rank, strict=True))
        params = {**options.booster_params, "eval_metric": metrics}
        for name in (*OF_COLUMNS, "disable_default_eval_metric"):
            params.pop(name, None)
        matrix = xgboost.DMatrix(
            np.zeros((len(labels), 1)),
            label=labels,
            weight=weights if len(weights) else None,
            base_margin=scores,
        )
        found = _own(xgboost.Booster(params, [matrix]), matrix, "train", 0)
        return {each.metric: each.value for each in found}

    exact: dict[str, float] = ranks.broadcast(outside(evaluate) if ranks.me == 0 else None)
    return exact


def _mean(parts: Iterable[tuple[list[Score], float]]) -> list[Score]:
    """Return the ranks' metrics averaged by the weight of their rows; skip weight 0."""
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

    The model's attributes hold the state, so a restart resumes with it.

    Args:
        booster: the booster after a round.
        history: the metrics of this and all earlier rounds.
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
        # "mape" is minimized, although its name starts with "map".
        maximize = metric.startswith(_MAXIMIZED) and metric != "mape"
    best = booster.attr("best_score")
    if len({_watched(scores) for scores in history[-2:]}) > 1:
        # It is the score of an earlier run's metric.
        best = None
    if best is None or (score > float(best) if maximize else score < float(best)):
        iteration = booster.num_boosted_rounds() - 1
        booster.set_attr(best_score=repr(score), best_iteration=str(iteration))
    return has_stopped(booster, patience)


def _watched(scores: Sequence[Score]) -> tuple[str, str] | None:
    """Return the data set and the metric that early stopping looks at; None without metrics."""
    return (scores[-1].dataset, scores[-1].metric) if scores else None


def has_stopped(booster: xgboost.Booster, patience: int) -> bool:
    """Return whether early stopping ends training with this model."""
    best = booster.attr("best_iteration")
    return best is not None and booster.num_boosted_rounds() - 1 - int(best) >= patience
