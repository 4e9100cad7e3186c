"""Sets leaf values to quantiles of residuals over all ranks' rows.

After a tree of `reg:absoluteerror` or `reg:quantileerror` has grown, XGBoost sets each leaf to a
quantile of its rows' residuals. Several ranks average theirs, which is wrong if their rows differ.
Here all residuals are gathered, and the quantiles are those of XGBoost in one process.

XGBoost can change leaves only in a model's JSON. Reloading the whole model in every round would be
slow, since XGBoost then predicts all rows with all trees. So each round trains a separate model
from the scores so far, and `GrowingBooster` appends its trees when the whole model is used.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import xgboost

from polytrain.boosting.columns import one_after_another, rows_by_leaf
from polytrain.boosting.sampling import Mask
from polytrain_xgboost.backend import XGBoost
from polytrain_xgboost.callbacks import Callbacks, TunableBooster
from polytrain_xgboost.collective import Outside, Ranks, outside_the_collective
from polytrain_xgboost.continuing import file_of
from polytrain_xgboost.matrices import TrainingData
from polytrain_xgboost.rounds import boost, drawn_rows

Floats = np.ndarray[Any, np.dtype[np.float32]]


class GrowingBooster(TunableBooster):
    """A booster that appends new trees only when they are used: it takes long."""

    _waiting: tuple[bytearray, ...] = ()

    def append(self, round_: bytearray) -> None:
        """Append the trees of a round.

        Args:
            round_: XGBoost's JSON of a model with only these trees.
        """
        self._waiting += (round_,)

    # What is called in every round doesn't depend on the trees, or counts them.

    def attr(self, key: str) -> str | None:
        with self._as_it_is():
            return cast("str | None", super().attr(key))

    def set_attr(self, **attributes: str | None) -> None:
        with self._as_it_is():
            super().set_attr(**attributes)

    def set_param(self, params: Any, value: Any = None) -> None:
        with self._as_it_is():
            super().set_param(params, value)

    def save_config(self) -> str:
        with self._as_it_is():
            return cast(str, super().save_config())

    def num_boosted_rounds(self) -> int:
        with self._as_it_is() as waiting:
            return int(super().num_boosted_rounds()) + len(waiting)

    @contextmanager
    def _as_it_is(self) -> Iterator[tuple[bytearray, ...]]:
        """Use the booster without the waiting trees, which this yields."""
        waiting, self._waiting = self._waiting, ()
        try:
            yield waiting
        finally:
            self._waiting = waiting

    def __del__(self) -> None:
        self._waiting = ()
        super().__del__()

    @property
    def handle(self) -> Any:
        """XGBoost's handle. All methods use it, so reading it first appends the waiting trees."""
        waiting, self._waiting = self._waiting, ()
        if waiting:
            with outside_the_collective() as outside:
                outside(self._append, waiting)
        return self._handle

    @handle.setter
    def handle(self, handle: Any) -> None:
        self._handle = handle

    def _append(self, texts: tuple[bytearray, ...]) -> None:
        model, rounds = json.loads(self.save_raw("json")), [*map(json.loads, texts)]
        if self.num_boosted_rounds() == 0:
            # A booster without trees has no features: the first round's model replaces it.
            attributes = model["learner"]["attributes"]
            model, *rounds = rounds
            model["learner"]["attributes"] = attributes
        trees = model["learner"]["gradient_booster"]["model"]
        for each in rounds:
            more = each["learner"]["gradient_booster"]["model"]
            for tree, group in zip(more["trees"], more["tree_info"], strict=True):
                trees["trees"].append({**tree, "id": len(trees["trees"])})
                trees["tree_info"].append(group)
            trees["iteration_indptr"].append(len(trees["trees"]))
        trees["gbtree_model_param"]["num_trees"] = str(len(trees["trees"]))
        _load(self, file_of(model))


class Leaves:
    """Boosts rounds, with leaf values from all ranks' residuals."""

    def __init__(
        self,
        booster: GrowingBooster,
        data: TrainingData,
        *,
        options: XGBoost,
        params: Mapping[str, Any],
        callbacks: Callbacks,
        ranks: Ranks,
        outside: Outside,
    ) -> None:
        """
        Args:
            booster: the booster to append trees to.
            data: this rank's data, whose base margins become the scores so far.
            params: XGBoost's parameters, with the initial score.
            callbacks: the user's callbacks, which may set other parameters.
            ranks: all ranks; each creates a `Leaves`.
            outside: makes calls outside the collective.
        """
        self._booster = booster
        self._data = data
        self._options = options
        self._params = params
        self._callbacks = callbacks
        self._ranks = ranks
        self._outside = outside
        self._latest: xgboost.Booster = booster

    def boost(self, round_: int) -> xgboost.Booster:
        """Boost a round. Return a booster that predicts this data as the whole model does.

        Args:
            round_: number of the round, from 0, counting rounds of the user's model.
        """
        data, params = self._data, {**self._params, **self._callbacks.params}
        scores = self._update_scores()
        one = TunableBooster(params, [data.train])
        boost(one, data, round_=round_, options=self._options, params=params)
        model = json.loads(one.save_raw("json"))
        drawn = drawn_rows(data, round_, self._options, params)
        self._set_leaves(model, one, scores, drawn)
        file = file_of(model)
        self._booster.append(file)
        self._latest = xgboost.Booster(params, [data.train, *data.evaluated.values()])
        self._outside(_load, self._latest, file)
        return self._latest

    def _update_scores(self) -> Floats:
        """Set the scores so far as base margins. Return those of "train", `[rows, groups]`."""
        data, latest = self._data, self._latest
        for matrix in data.evaluated.values():
            matrix.set_base_margin(self._outside(latest.predict, matrix, output_margin=True))
        scores = latest.predict(data.train, output_margin=True)
        data.train.set_base_margin(scores)
        return scores.reshape(data.train.num_row(), -1)

    def _set_leaves(
        self, model: Any, one: xgboost.Booster, scores: Floats, drawn: Mask | None
    ) -> None:
        """Set the leaves of a round's model.

        Args:
            model: the parsed JSON of the model, to change.
            one: the same model as a booster.
            scores: the scores of "train" before the round, of shape `[rows, groups]`.
            drawn: mask of this rank's rows that the round has used; None for all.
        """
        train, config = self._data.train, json.loads(one.save_config())["learner"]
        trees = model["learner"]["gradient_booster"]["model"]
        rate = np.float32(config["gradient_booster"]["tree_train_param"]["eta"])
        rate /= np.float32(trees["gbtree_model_param"]["num_parallel_tree"])
        given = config["objective"].get("quantile_loss_param", {}).get("quantile_alpha", "[0.5]")
        alphas = [float(np.float32(alpha)) for alpha in json.loads(given)]
        weights = train.get_weight() if drawn is None else self._data.weights * drawn
        # XGBoost leaves out rows whose hessian is 0.
        used = weights > 0 if len(weights) else slice(None)
        nodes = one.predict(train, pred_leaf=True).reshape(train.num_row(), -1).astype(np.int32)
        residuals = train.get_label()[:, np.newaxis] - scores
        mine = nodes[used], residuals[used], weights[used] if len(weights) else None
        nodes, residuals, weights = map(
            one_after_another, zip(*self._ranks.gathered(mine), strict=True)
        )
        for index, group in enumerate(trees["tree_info"]):
            for leaf, rows in rows_by_leaf(nodes[:, index]):
                its_weights = None if weights is None else weights[rows]
                value = quantile(residuals[rows, group], its_weights, alphas[group])
                trees["trees"][index]["split_conditions"][leaf] = float(value * rate)


def quantile(values: Floats, weights: Floats | None, alpha: float) -> np.float32:
    """Return a quantile as XGBoost's objectives compute it.

    Args:
        values: float32, shape `[rows]`, one or more.
        weights: float32, shape `[rows]`, above 0; None interpolates between values.
        alpha: the quantile, from 0 to 1.
    """
    order = np.argsort(values, kind="stable")
    values = values[order]
    if weights is not None:
        sums = np.cumsum(weights[order], dtype=np.float32)
        place = int(np.searchsorted(sums, np.float32(float(sums[-1]) * alpha)))
        return np.float32(values[min(place, len(values) - 1)])
    count = len(values)
    if alpha <= 1 / (count + 1):
        return np.float32(values[0])
    if alpha >= count / (count + 1):
        return np.float32(values[-1])
    position = alpha * (count + 1)
    place = int(position) - 1
    low, high = values[place], values[place + 1]
    return np.float32(float(low) + (position - 1 - place) * float(high - low))


def _load(booster: xgboost.Booster, model: bytearray) -> None:
    """Load a model's JSON, and apply it now: later, that would be a collective operation."""
    booster.load_model(model)
    booster.save_config()
