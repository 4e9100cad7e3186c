"""Sets leaf values to percentiles of residuals over all ranks' rows.

After a tree of `l1`, `quantile` or `mape` has grown, LightGBM sets each leaf to a percentile of its
rows' residuals. Several machines average their percentiles, which is wrong if their rows differ.
Here rank 0 gathers all residuals, and computes the percentiles of LightGBM in one process.

LightGBM can set a leaf's value, but doesn't update the scores then. It does so when it rolls a tree
back. So each tree grows at a learning rate that changes no score, and its copy with the percentiles
goes into another booster. Then the training booster gets negated leaves and rolls the tree back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightgbm
import numpy as np

from polytrain.boosting.columns import Numbers, one_after_another, rows_by_leaf
from polytrain.boosting.sampling import Mask
from polytrain_lightgbm.backend import LightGBM
from polytrain_lightgbm.collective import Collective
from polytrain_lightgbm.datasets import Rows
from polytrain_lightgbm.first_score import inner_values, with_trees
from polytrain_lightgbm.network import QUIET, by_itself, tiny_booster
from polytrain_lightgbm.objectives import objective_of
from polytrain_lightgbm.parameters import parameter_names
from polytrain_lightgbm.private import merge
from polytrain_lightgbm.train_metrics import predictions_of

_NO_RATE = 2.0**-100
"""A learning rate at which a tree changes no score. Dividing by this power of 2 is exact; with a
smaller rate LightGBM would round leaves to 0."""


class Leaves:
    """Collects the trees of a run, with leaf values from all ranks' residuals."""

    def __init__(
        self,
        booster: lightgbm.Booster,
        model: lightgbm.Booster | None,
        options: LightGBM,
        rows: Rows,
        collective: Collective,
    ) -> None:
        """
        Args:
            booster: this rank's booster, before its first round.
            model: model to resume from, whose trees the booster has too.
            collective: connects all ranks; each creates a `Leaves`.
        """
        if model is None:
            # Otherwise LightGBM would keep a first tree without a split, and couldn't roll it back.
            merge(booster, by_itself(_without_a_split))
        self.model = model
        """The model with all trees, for predictions and checkpoints."""

        self._booster = booster
        self._before = booster.num_trees()
        self._rows = rows
        self._collective = collective
        objective = objective_of(options.params)
        # LightGBM holds it in float32.
        given = options.params.get("alpha", 0.9) if objective == "quantile" else 0.5
        self._alpha = float(np.float32(given))
        self._weights = rows.weights
        if objective == "mape":
            shares = 1 / np.maximum(1, np.abs(rows.labels))
            self._weights = shares if rows.weights is None else shares * rows.weights
        self._scores = predictions_of(booster).astype(float)
        self._rate: dict[str, Any] = {}

    def before_round(self) -> dict[str, Any]:
        """Note the learning rate, which callbacks may have changed; return the one to grow at."""
        params = self._booster.params
        names = parameter_names("learning_rate")
        name = next((each for each in names if each in params), "learning_rate")
        self._rate = {name: float(params.get(name, 0.1))}
        return {name: _NO_RATE}

    def after_round(self, drawn: Mask | None) -> None:
        """Set the leaves of the round's tree, and move the tree into `model`.

        Args:
            drawn: mask of this rank's rows that the round has used; None for all.
        """
        booster, index = self._booster, self._before
        booster.reset_parameter(self._rate)
        if booster.num_trees() > index:
            [rate] = self._rate.values()
            [tree] = booster.dump_model(start_iteration=index, num_iteration=1)["tree_info"]
            grown = [booster.get_leaf_output(index, leaf) for leaf in range(tree["num_leaves"])]
            leaves = self._rows.leaves(booster, index)
            values = self._percentiles(leaves, np.array(grown) / _NO_RATE, drawn) * rate
            self._scores += values[leaves]
            self._set(values)
            inner = dict(inner_values(tree["tree_structure"]))
            scaled = (inner[node] / _NO_RATE * rate for node in sorted(inner))
            lines = {"internal_value": " ".join(map(repr, scaled))}
            self._keep(index, {**lines, "shrinkage": repr(float(rate))})
            self._set(np.array(grown) - values)
            booster.rollback_one_iter()
        elif self.model is None:
            # The first round found no split.
            rows = sum(self._collective.all_gather(len(self._scores)))
            self._keep(0, {"leaf_count": str(rows)})

    def _percentiles(self, leaves: Numbers, grown: Numbers, drawn: Mask | None) -> Numbers:
        """Return each leaf's percentile, shape `[leaves]`; its grown value if it has no rows."""
        used = slice(None) if drawn is None else drawn
        residuals = self._rows.labels - self._scores
        weights = None if self._weights is None else self._weights[used]
        everybodys = self._collective.gather((leaves[used], residuals[used], weights))
        found = None
        if everybodys is not None:
            leaves, residuals, weights = map(one_after_another, zip(*everybodys, strict=True))
            found = grown.copy()
            for leaf, rows in rows_by_leaf(leaves):
                its_weights = None if weights is None else weights[rows]
                found[leaf] = percentile(residuals[rows], its_weights, self._alpha)
        values: Numbers = self._collective.broadcast(found)
        return values

    def _set(self, values: Numbers) -> None:
        for leaf, value in enumerate(values):
            self._booster.set_leaf_output(self._before, leaf, float(value))

    def _keep(self, index: int, lines: Mapping[str, str]) -> None:
        """Append a copy of one tree of the booster to `model`, with some lines replaced."""
        text = self._booster.model_to_string(start_iteration=index, num_iteration=1)
        kept = lightgbm.Booster(model_str=with_trees(text, {0: lines}))
        if self.model is not None:
            merge(kept, self.model)
        self.model = kept


def percentile(values: Numbers, weights: Numbers | None, alpha: float) -> float:
    """Return a percentile as LightGBM's objectives compute it.

    Args:
        values: float64, shape `[rows]`, one or more.
        weights: float32, shape `[rows]`; None if all are equal.
        alpha: the percentile as a fraction, from 0 to 1.
    """
    if len(values) == 1:
        return float(values[0])
    order = np.argsort(values, kind="stable")
    values = values[order]
    if weights is None:
        # Without weights LightGBM counts from the largest value.
        position = (len(values) - 1) * (1 - alpha)
        place = int(position) + 1
        if place >= len(values):
            return float(values[0])
        high, low = values[-place], values[-place - 1]
        return float(high - (high - low) * (position - (place - 1)))
    sums = np.cumsum(weights[order], dtype=float)
    threshold = sums[-1] * alpha
    place = min(int(np.searchsorted(sums, threshold, side="right")), len(values) - 1)
    if place in (0, len(values) - 1):
        return float(values[place])
    low, high = values[place - 1], values[place]
    step = sums[place] - sums[place - 1]
    if step < 1:
        return float(low)
    return float((threshold - sums[place - 1]) / step * (high - low) + low)


def _without_a_split() -> lightgbm.Booster:
    """Return a booster with one tree that predicts 0."""
    booster = tiny_booster(QUIET, label=0.0)
    booster.update()
    return booster
