"""Boosts on one rank, in step with the others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import xgboost

from polytrain_xgboost.backend import XGBoost
from polytrain_xgboost.callbacks import Callbacks, TunableBooster
from polytrain_xgboost.collective import Outside, Ranks
from polytrain_xgboost.evaluating import evaluated, is_exhausted
from polytrain_xgboost.history import History
from polytrain_xgboost.intercept import estimated_intercept, of_each_output
from polytrain_xgboost.leaves import GrowingBooster, Leaves
from polytrain_xgboost.matrices import TrainingData, training_data
from polytrain_xgboost.parameters import number_of_outputs
from polytrain_xgboost.rounds import boost

logger = logging.getLogger(__name__)

Report = Callable[[int, Mapping[str, float], xgboost.Booster], None]
"""Called after every round with the round's number, from 1, its metrics and the booster."""


@dataclass(kw_only=True)
class Boosting:
    """Boosting on one rank, and the state to save besides the trees."""

    options: XGBoost
    params: Mapping[str, Any]
    ranks: Ranks
    outside: Outside
    directory: Path | None = None
    """Directory for the bins, with external memory."""

    history: History = field(default_factory=History)
    has_estimated: bool = False
    """Whether this package estimated the initial score, rather than the user setting it."""

    def train(
        self, tables: Mapping[str, pa.Table], model: xgboost.Booster | None, report: Report
    ) -> xgboost.Booster:
        """Boost the remaining rounds.

        Args:
            tables: the rank's shard "train"; on rank 0, all rows of every other data set.
            model: model to resume from; None to start without trees.
            report: called after every round.
        """
        data = training_data(
            tables,
            options=self.options,
            params=self.params,
            ranks=self.ranks,
            outside=self.outside,
            model=model,
            directory=self.directory,
        )
        params = {**self.params, "max_bin": data.max_bin, **self._first_score(data, model)}
        matrices = [data.train, *data.evaluated.values()]
        several = self.ranks.size > 1
        if several and self.ranks.me == 0 and self.options.averages_leaves:
            logger.warning(
                "XGBoost averages the workers' leaves with booster='dart' and the objective %r: "
                "the model is worse if the workers' rows differ. Use 'gbtree', or one worker.",
                self.params["objective"],
            )
        gathers = several and self.options.quantiles_in_leaves
        kind = GrowingBooster if gathers else TunableBooster
        booster = kind(params, matrices, model_file=model)
        callbacks = Callbacks(self.options.callbacks, history=self.history, ranks=self.ranks)
        booster = callbacks.before_training(booster)
        leaves = None
        if gathers:
            leaves = Leaves(
                booster,
                data,
                options=self.options,
                params=params,
                callbacks=callbacks,
                ranks=self.ranks,
                outside=self.outside,
            )
        return self._boost(booster, data, callbacks, leaves, report)

    def _boost(
        self,
        booster: xgboost.Booster,
        data: TrainingData,
        callbacks: Callbacks,
        leaves: Leaves | None,
        report: Report,
    ) -> xgboost.Booster:
        options, history = self.options, self.history
        done, patience = len(history.rounds), options.early_stopping_rounds
        history.has_best = patience is not None
        # Rounds of the user's model don't count towards `num_boost_round`.
        before = booster.num_boosted_rounds() - done
        if callbacks.before_iteration(booster, done):
            return callbacks.after_training(booster)
        while True:
            # XGBoost starts to learn position biases only in round 0.
            round_ = done if options.needs_all_rounds else before + done
            if leaves is None:
                # Callbacks may have changed some.
                params = {**self.params, **callbacks.params}
                boost(booster, data, round_=round_, options=options, params=params)
            scores = evaluated(
                booster if leaves is None else leaves.boost(round_),
                data,
                round_=round_,
                options=options,
                ranks=self.ranks,
                outside=self.outside,
            )
            history.rounds.append(scores)
            exhausted = patience is not None and is_exhausted(
                booster, history.rounds, options=options, patience=patience
            )
            done += 1
            over = (
                callbacks.after_iteration(booster, done - 1, scores)
                or exhausted
                or done >= options.num_boost_round
                or callbacks.before_iteration(booster, done)
            )
            if over:
                booster = callbacks.after_training(booster)
            # Report last, so that this round's checkpoint holds the callbacks' decision too.
            metrics = {f"{score.dataset}-{score.metric}": score.value for score in scores}
            report(done, metrics, booster)
            if over:
                return booster

    def _first_score(self, data: TrainingData, model: xgboost.Booster | None) -> dict[str, str]:
        """Return the initial score as a parameter; {} if none is to be estimated."""
        options = self.options
        if (given := options.params.get("base_score")) is not None:
            return {"base_score": of_each_output(given, number_of_outputs(self.params))}
        if model is not None or options.obj is not None:
            return {}
        self.has_estimated = True
        estimate = estimated_intercept(
            data.facts, self.params, ranks=self.ranks, outside=self.outside
        )
        return {"base_score": estimate}
