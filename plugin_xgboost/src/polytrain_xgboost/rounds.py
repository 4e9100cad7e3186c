"""A boosting round: what is drawn before it, and what is evaluated and decided after it.

Every round draws from the seed and its own number alone. So one that comes after a restart is the
one that would have come without.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import xgboost

from polytrain.data.draws import drawn
from polytrain_xgboost.matrices import TrainingData
from polytrain_xgboost.outside import Outside

# Metrics of which more is better, by the beginning of their names; all others are losses.
_MAXIMIZED = ("auc", "aucpr", "pre", "map", "ndcg")

_COLUMN_DRAWS = ("colsample_bytree", "colsample_bylevel", "colsample_bynode")


@contextmanager
def rows_drawn(data: TrainingData, *, rate: float, seed: int, round_: int) -> Iterator[None]:
    """Have only those rows count that are drawn for a round: XGBoost's `subsample`.

    XGBoost would draw by the rows' numbers on the rank: another model for every way to split them.
    These are drawn by their numbers in the whole data set; one that isn't has no weight.
    """
    if rate == 1:
        yield
        return
    weights = data.weights
    mask = drawn(rate, seed=seed, round_=round_, first=data.first_row, rows=len(weights))
    data.train.set_weight(weights * mask)
    yield
    # Metrics are over all rows.
    data.train.set_weight(weights)


def draws_columns(params: Mapping[str, Any]) -> bool:
    """Whether trees see a random part of the columns."""
    return any(float(params.get(name, 1)) != 1 for name in _COLUMN_DRAWS)


def forget_column_draws(booster: xgboost.Booster, method: str) -> None:
    """Have the next round draw its columns anew, from the seed and its number.

    What grows trees has a generator of its own, which goes on from round to round and isn't in the
    model. Another method, and back again, makes XGBoost build a new one.
    """
    booster.set_param({"tree_method": "approx"})
    booster.save_config()
    booster.set_param({"tree_method": method})


def evaluated(
    booster: xgboost.Booster, data: TrainingData, *, round_: int, train: bool, outside: Outside
) -> dict[str, float]:
    """The metrics of a round, those of "train" first.

    Every rank has all rows of the data sets that are only evaluated, and what it finds is what one
    process would. Of "train" each has its part: XGBoost puts the metrics together.
    """
    found = []
    if train:
        found.append(booster.eval_set([(data.train, "train")], round_))
    if data.evaluated:
        pairs = [(matrix, name) for name, matrix in data.evaluated.items()]
        found.append(outside(booster.eval_set, pairs, round_))
    # The round's number, and "name:value" for every metric.
    parts = (part.rpartition(":") for text in found for part in text.split("\t")[1:])
    return {name: float(value) for name, _, value in parts}


def is_exhausted(
    booster: xgboost.Booster, metrics: Mapping[str, float], *, round_: int, patience: int
) -> bool:
    """Whether the last metric hasn't improved for so many rounds, by XGBoost's own rule.

    What it remembers is in the model's attributes: a restart goes on with it.
    """
    name, score = list(metrics.items())[-1]
    metric = name.rpartition("-")[2]
    # "mape" is a loss whose name begins like the gain "map".
    maximize = metric.startswith(_MAXIMIZED) and metric != "mape"
    best = booster.attr("best_score")
    if best is None or (score > float(best) if maximize else score < float(best)):
        booster.set_attr(best_score=repr(score), best_iteration=str(round_))
    return has_stopped(booster, patience)


def has_stopped(booster: xgboost.Booster, patience: int) -> bool:
    """Whether early stopping ends training with this model."""
    stale = booster.num_boosted_rounds() - 1 - int(booster.attr("best_iteration") or 0)
    return stale >= patience
