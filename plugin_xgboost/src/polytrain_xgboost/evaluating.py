"""What is evaluated after a boosting round, and what early stopping makes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import xgboost

from polytrain_xgboost.backend import XGBoost
from polytrain_xgboost.collecting import Ranks
from polytrain_xgboost.history import Score
from polytrain_xgboost.matrices import TrainingData
from polytrain_xgboost.outside import Outside

# Metrics of which more is better, by the beginning of their names; all others are losses.
_MAXIMIZED = ("auc", "aucpr", "pre", "map", "ndcg")

Metric = Callable[[Any, xgboost.DMatrix], Any]
"""A metric of the user's: predictions and a matrix to name and value, or to a list of these."""


def evaluated(
    booster: xgboost.Booster,
    data: TrainingData,
    *,
    round_: int,
    options: XGBoost,
    ranks: Ranks,
    outside: Outside,
) -> list[Score]:
    """The metrics of a round, those of "train" first; the same on every rank.

    Data sets that are only evaluated are rank 0's, all rows of them: what it finds is what one
    process would. Of "train" each rank has its part. XGBoost puts its own metrics together; one of
    the user's is the mean by weight.
    """
    found: list[Score] = []
    custom = None if options.custom_metric is None else _Custom(options)
    if options.eval_train:
        found += _own(booster, data.train, "train", round_)
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
        found += ranks.told(outside(others) if ranks.me == 0 else None)
    return found


class _Custom:
    """The user's own metric, by XGBoost's rules."""

    def __init__(self, options: XGBoost) -> None:
        assert options.custom_metric is not None
        self._metric: Metric = options.custom_metric
        # Whoever has an objective of their own knows what its scores mean; XGBoost doesn't.
        self._margin = options.obj is not None

    def scores(self, booster: xgboost.Booster, matrix: xgboost.DMatrix, name: str) -> list[Score]:
        """Of one data set, in full precision: XGBoost itself keeps six decimals."""
        predictions = booster.predict(matrix, training=False, output_margin=self._margin)
        told = self._metric(predictions, matrix)
        pairs = told if isinstance(told, list) else [told]
        return [Score(name, metric, float(value)) for metric, value in pairs]


def _own(booster: xgboost.Booster, matrix: xgboost.DMatrix, name: str, round_: int) -> list[Score]:
    """XGBoost's metrics of one data set."""
    text = booster.eval_set([(matrix, name)], round_)
    # The round's number, and "name-metric:value" for every metric.
    parts = (part.rpartition(":") for part in text.split("\t")[1:])
    return [Score(name, told.removeprefix(f"{name}-"), float(value)) for told, _, value in parts]


def _mean(parts: Iterable[tuple[list[Score], float]]) -> list[Score]:
    """The ranks' metrics in one, each with the weight of its rows. Some may have none."""
    parts = [(scores, weight) for scores, weight in parts if weight > 0]
    total = sum(weight for _, weight in parts)
    return [
        one._replace(value=sum(scores[i].value * weight for scores, weight in parts) / total)
        for i, one in enumerate(parts[0][0])
    ]


def is_exhausted(
    booster: xgboost.Booster, history: list[list[Score]], *, options: XGBoost, patience: int
) -> bool:
    """Whether the last metric hasn't improved for so many rounds, by XGBoost's own rule.

    What it remembers is in the model's attributes: a restart goes on with it.

    Args:
        booster: after a round.
        history: of this and all rounds before it.
        options: of the run.
        patience: rounds to wait.

    Raises:
        ValueError: nothing has been evaluated.
    """
    if not history[-1]:
        raise ValueError(
            "early_stopping_rounds looks at a metric, and there is none. Leave out "
            "'disable_default_eval_metric', or give params['eval_metric'] or custom_metric."
        )
    _, metric, score = history[-1][-1]
    maximize = options.maximize
    if maximize is None:
        # "mape" is a loss whose name begins like the gain "map".
        maximize = metric.startswith(_MAXIMIZED) and metric != "mape"
    # What a model that was given remembers is of other data.
    best = booster.attr("best_score") if len(history) > 1 else None
    if best is None or (score > float(best) if maximize else score < float(best)):
        iteration = booster.num_boosted_rounds() - 1
        booster.set_attr(best_score=repr(score), best_iteration=str(iteration))
    return has_stopped(booster, patience)


def has_stopped(booster: xgboost.Booster, patience: int) -> bool:
    """Whether early stopping ends training with this model."""
    stale = booster.num_boosted_rounds() - 1 - int(booster.attr("best_iteration") or 0)
    return stale >= patience
