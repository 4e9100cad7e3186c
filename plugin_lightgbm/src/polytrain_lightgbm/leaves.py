"""Leaf values that are percentiles of residuals, of all ranks' rows.

After a tree of `l1`, `quantile` or `mape` has grown, LightGBM gives each leaf a percentile of its
rows' residuals; several machines average theirs, which is wrong if their rows differ. Here rank 0
gets all residuals, and computes what LightGBM in one process does.

LightGBM can set a leaf's value, but doesn't correct the scores. It does when it takes a tree back:
so each tree is moved into another booster, and the one that trains takes back the difference.
"""

from __future__ import annotations

import lightgbm
import numpy as np
from lightgbm.basic import _LIB, _safe_call

from polytrain.boosting.numbers import Numbers
from polytrain.boosting.row_draws import Mask
from polytrain_lightgbm.backend import LightGBM
from polytrain_lightgbm.collective import Collective
from polytrain_lightgbm.datasets import Rows
from polytrain_lightgbm.network import QUIET, by_itself, tiny_booster
from polytrain_lightgbm.objectives import objective_of
from polytrain_lightgbm.train_metrics import predictions_of


class Leaves:
    """Keeps the trees of a run, with leaves of all ranks' residuals."""

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
            model: trees to resume from, which the booster has too.
            options: the run's options.
            rows: this rank's rows.
            collective: all ranks, each of which makes one.
        """
        if model is None:
            # Else LightGBM would keep a first tree without a split, and couldn't take it back.
            merge(booster, by_itself(_without_a_split))
        self.model = model
        """All trees, to predict and to save."""

        self._booster = booster
        self._before = booster.num_trees()
        self._rows = rows
        self._collective = collective
        objective = objective_of(options.params)
        # In single precision, as LightGBM has it.
        given = options.params.get("alpha", 0.9) if objective == "quantile" else 0.5
        self._alpha = float(np.float32(given))
        self._weights = rows.weights
        if objective == "mape":
            shares = 1 / np.maximum(1, np.abs(rows.labels))
            self._weights = shares if rows.weights is None else shares * rows.weights
        self._scores = predictions_of(booster)

    def after_round(self, drawn: Mask | None) -> None:
        """Give the leaves of the round's tree their values, and move it into `model`.

        Args:
            drawn: this rank's rows that the round has used; None for all.
        """
        booster, index = self._booster, self._before
        if booster.num_trees() > index:
            [tree] = booster.dump_model(start_iteration=index, num_iteration=1)["tree_info"]
            before = [booster.get_leaf_output(index, leaf) for leaf in range(tree["num_leaves"])]
            after = self._percentiles(before, tree["shrinkage"], drawn)
            self._set(after)
            self._keep(index)
            self._set(np.array(before) - after)
            booster.rollback_one_iter()
        elif self.model is None:
            self._keep(0)
        self._scores = predictions_of(booster)

    def _percentiles(self, before: list[float], shrinkage: float, drawn: Mask | None) -> Numbers:
        """Return the value of each leaf; the one that it has, if it has no rows."""
        used = slice(None) if drawn is None else drawn
        leaves = self._rows.leaves(self._booster, self._before)[used]
        residuals = (self._rows.labels.astype(float) - self._scores)[used]
        weights = None if self._weights is None else self._weights[used]
        everybodys = self._collective.gather((leaves, residuals, weights))
        found = None
        if everybodys is not None:
            columns = zip(*everybodys, strict=True)
            leaves, residuals, weights = (
                None if column[0] is None else np.concatenate(column) for column in columns
            )
            found = np.array(before)
            order = np.argsort(leaves, kind="stable")
            kinds, starts = np.unique(leaves[order], return_index=True)
            for leaf, rows in zip(kinds, np.split(order, starts[1:]), strict=True):
                its_weights = None if weights is None else weights[rows]
                found[leaf] = shrinkage * percentile(residuals[rows], its_weights, self._alpha)
        values: Numbers = self._collective.broadcast(found)
        return values

    def _set(self, values: Numbers) -> None:
        for leaf, value in enumerate(values):
            self._booster.set_leaf_output(self._before, leaf, float(value))

    def _keep(self, index: int) -> None:
        """Append a copy of one of the booster's trees to `model`."""
        text = self._booster.model_to_string(start_iteration=index, num_iteration=1)
        kept = lightgbm.Booster(model_str=text)
        if self.model is not None:
            merge(kept, self.model)
        self.model = kept


def percentile(values: Numbers, weights: Numbers | None, alpha: float) -> float:
    """Return a percentile as LightGBM's objectives compute it.

    Args:
        values: float64, shape `[rows]`, one or more.
        weights: float32, shape `[rows]`; None if all count alike.
        alpha: from 0 to 1.
    """
    if len(values) == 1:
        return float(values[0])
    order = np.argsort(values, kind="stable")
    values = values[order]
    if weights is None:
        # From above.
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


def merge(booster: lightgbm.Booster, other: lightgbm.Booster) -> None:
    """Insert copies of another booster's trees before a booster's own.

    What `lightgbm.train(init_model=…)` does; but that predicts every row in Python first.
    """
    _safe_call(_LIB.LGBM_BoosterMerge(booster._handle, other._handle))


def _without_a_split() -> lightgbm.Booster:
    """Return a booster with a tree that predicts 0."""
    booster = tiny_booster(QUIET, label=0.0)
    booster.update()
    return booster
