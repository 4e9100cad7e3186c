"""A boosting round: the random draws before it, and the evaluation after it.

A round's draws depend only on the seed and the round's number, so a restart doesn't change them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import lightgbm
import numpy as np
from lightgbm.basic import EvalResult

from polytrain.boosting.columns import Numbers
from polytrain.boosting.sampling import Mask, Objective, Rates, drawn, of_rows
from polytrain_lightgbm.backend import LightGBM
from polytrain_lightgbm.collective import Collective
from polytrain_lightgbm.datasets import Agreement, Rows
from polytrain_lightgbm.parameters import is_true, value
from polytrain_lightgbm.private import field_of
from polytrain_lightgbm.train_metrics import TrainMetrics, plain


@dataclass(frozen=True, slots=True, kw_only=True)
class RowDraws:
    """Draws the rows that a round uses, in place of LightGBM's bagging.

    LightGBM draws rows by their numbers on the worker, so its model depends on how rows are split.
    Here rows are drawn by their numbers in the whole data set; the others get weight 0.
    """

    options: LightGBM
    agreement: Agreement

    @classmethod
    def of(cls, options: LightGBM, agreement: Agreement) -> RowDraws | None:
        """Return the draws of a run; None if this package draws no rows."""
        return cls(options=options, agreement=agreement) if options.draws_rows else None

    def prepare(self, train: lightgbm.Dataset) -> None:
        """Set every row's weight: a booster that starts without weights can't get them later."""
        train.set_field("weight", self._weights)

    def update(
        self,
        booster: lightgbm.Booster,
        train: lightgbm.Dataset,
        round_: int,
        fobj: Objective | None,
    ) -> None:
        """Boost a round on the rows that are drawn for it."""
        mask = self.mask(booster, round_)
        if fobj is not None:
            booster.update(fobj=of_rows(fobj, mask, order="F"))
            return
        weights = field_of(train, "weight")
        weights *= mask
        booster.update()
        # Metrics use all rows.
        weights[:] = self._weights

    @property
    def _rows(self) -> Rows:
        return self.agreement.rows["train"]

    @property
    def _weights(self) -> Numbers:
        rows = self._rows
        return np.ones_like(rows.labels) if rows.weights is None else rows.weights

    def mask(self, booster: lightgbm.Booster, round_: int) -> Mask:
        """Return a mask of this rank's rows that are drawn for a round, shape `[rows]`."""

        def now(name: str, default: Any) -> Any:
            # The booster begins without these parameters: it has those that callbacks have set.
            return value(booster.params, name, value(params, name, default))

        rows, params = self._rows, self.options.params
        draw = round_ // int(value(params, "bagging_freq"))
        seed = int(now("bagging_seed", self.options.seed))
        rate = float(now("bagging_fraction", 1))
        if rows.query_sizes is not None and is_true(params, "bagging_by_query"):
            first, count = self.agreement.numbers.first_query, len(rows.query_sizes)
            mask = drawn(rate, seed=seed, round_=draw, first=first, rows=count)
            return np.repeat(mask, rows.query_sizes)
        rates: float | Rates = rate
        low, high = (float(now(f"{s}_bagging_fraction", 1)) for s in ("neg", "pos"))
        if self.options.may_draw_by_label and min(low, high) < 1:
            rates = np.where(rows.labels > 0, high, low)
        first, count = self.agreement.numbers.first_row, len(rows.labels)
        return drawn(rates, seed=seed, round_=draw, first=first, rows=count)


def check_draws(booster: lightgbm.Booster, options: LightGBM) -> None:
    """Check that callbacks haven't made LightGBM draw rows itself.

    Raises:
        ValueError: it would draw them by their numbers on the worker.
    """
    has_freq = value(booster.params, "bagging_freq") is not None
    if (options.draws_rows and has_freq) or replace(options, params=booster.params).draws_rows:
        raise ValueError(
            "callbacks: one has set a parameter by which LightGBM draws the rows of each worker "
            "itself, so the model would depend on the number of workers. Set bagging_freq and a "
            "bagging_fraction below 1 in params, and let the callback change the fraction only."
        )


def reset_draws(booster: lightgbm.Booster, options: LightGBM, round_: int, **others: Any) -> None:
    """Make a round's columns and random thresholds depend only on its number.

    LightGBM's generators continue from round to round and aren't in the model. A new seed makes
    LightGBM create new generators.

    Args:
        others: further parameters to reset.
    """
    if round_ > 0:
        before = _seeds(booster, options, round_ - 1)
        if not before.items() <= booster.params.items():
            # A booster may have this round's seeds already, and would draw on from where it is.
            booster.reset_parameter(before)
    booster.reset_parameter({**_seeds(booster, options, round_), **others})


def _seeds(booster: lightgbm.Booster, options: LightGBM, round_: int) -> dict[str, Any]:
    # Callbacks may have changed the booster's parameters.
    now, given, found = booster.params, options.params, {}
    fractions = (value(now, f"feature_fraction{part}", 1) for part in ("", "_bynode"))
    if any(float(fraction) != 1 for fraction in fractions):
        seed = given.get("feature_fraction_seed", options.seed)
        found["feature_fraction_seed"] = int(seed) + round_
    if is_true(now, "extra_trees"):
        found["extra_seed"] = int(given.get("extra_seed", options.seed)) + round_
    return found


def evaluated(
    booster: lightgbm.Booster,
    options: LightGBM,
    *,
    train: TrainMetrics | None,
    collective: Collective,
) -> list[EvalResult]:
    """Return the metrics of a round, "train" first; the same on every rank.

    Rank 0 has all rows of the evaluation sets, and broadcasts their metrics.
    """
    of_train = [] if train is None else train.after_round()
    return of_train + collective.broadcast([*map(plain, booster.eval_valid(options.feval))])
