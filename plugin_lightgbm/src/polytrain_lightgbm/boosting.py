"""Boosts on one of LightGBM's machines, in step with the others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import lightgbm
import numpy as np
import pyarrow as pa
from lightgbm.callback import CallbackEnv, EarlyStopException

from polytrain.boosting.columns import one_after_another
from polytrain.boosting.sampling import Objective
from polytrain_lightgbm.backend import LightGBM
from polytrain_lightgbm.collective import Collective
from polytrain_lightgbm.datasets import Agreement, agreed
from polytrain_lightgbm.first_score import FirstScore, estimated, with_rows_of_unsplit
from polytrain_lightgbm.history import History, StoppingRule
from polytrain_lightgbm.leaves import Leaves
from polytrain_lightgbm.network import by_itself
from polytrain_lightgbm.parameters import (
    own_name,
    parallel_params,
    reported_by_one_machine,
    value,
)
from polytrain_lightgbm.private import begin_record, field_of, is_recording, merge
from polytrain_lightgbm.rounds import RowDraws, check_draws, evaluated, reset_draws
from polytrain_lightgbm.train_metrics import TrainMetrics

logger = logging.getLogger(__name__)

_PARAMETERS = "\nparameters:"
"""The line that follows the trees in a model's text."""

Report = Callable[[int, Mapping[str, float], lightgbm.Booster], None]
"""Called after every round with the round's number, from 1, its metrics and the booster."""


@dataclass(kw_only=True)
class Boosting:
    """Boosting on one machine, and the state to save besides the trees."""

    options: LightGBM
    threads: int
    machines: int
    collective: Collective
    in_step: Callable[[], None] = lambda: None
    """Called before LightGBM waits for the other machines; raises if one of them has left."""

    calls_back: bool = False
    """Whether there are callbacks, which may end training on one machine only."""

    history: History = field(default_factory=History)
    _rows: int = 0
    """Number of rows of all machines."""

    _read_trees: int = 0
    """Number of trees of the model to resume from."""

    _first_score: FirstScore | None = None
    _reported_params: str = ""
    """The parameters' part of the model's text, before a round changes some of them."""

    def train(
        self, tables: Mapping[str, pa.Table], model: lightgbm.Booster | None, report: Report
    ) -> lightgbm.Booster:
        """Boost the remaining rounds.

        Args:
            tables: the rank's shard "train"; on rank 0, all rows of every other data set.
            model: model to resume from; None to start without trees.
            report: called after every round.
        """
        options, begins_with_model = self.options, self.history.given_iterations > 0
        if self.collective.rank == 0:
            _warn(options, begins_with_model)
        params = options.booster_params(self.threads)
        agreement = agreed(
            tables, options=options, params=params, collective=self.collective, model=model
        )
        self._rows = agreement.numbers.total_rows
        self._read_trees = 0 if model is None else model.num_trees()
        if model is None and options.begins_with_a_score:
            self._first_score = self._estimated(agreement, params)
            params["boost_from_average"] = False
        datasets = {
            name: agreement.dataset(
                rows, self._first_score, model, begins_with_model=begins_with_model
            )
            for name, rows in agreement.rows.items()
        }
        draws = RowDraws.of(options, agreement)
        if draws is not None:
            draws.prepare(datasets["train"])
        booster = _booster({**params, **parallel_params(self.machines)}, datasets, model)
        self._reported_params = booster.model_to_string().partition(_PARAMETERS)[2]
        booster.reset_parameter(self.history.params)
        leaves = None
        if options.renews_leaves:
            leaves = Leaves(booster, model, options, agreement.rows["train"], self.collective)
        return self._boost(booster, datasets["train"], agreement, draws, leaves, report)

    def text_of(self, booster: lightgbm.Booster, iterations: int = -1) -> str:
        """Return the model's text, as LightGBM in one process writes it.

        Args:
            booster: the model.
            iterations: how many of its first iterations; -1 for all.
        """
        if not self._reported_params:
            return booster.model_to_string(num_iteration=iterations)
        if self._first_score is None:
            text = booster.model_to_string(num_iteration=iterations)
        else:
            text = self._first_score.as_text(booster, iterations)
        trees = with_rows_of_unsplit(
            text.partition(_PARAMETERS)[0],
            first=self.history.given_iterations * booster.num_model_per_iteration(),
            read=self._read_trees,
            rows=self._rows,
        )
        return (
            trees
            + _PARAMETERS
            + reported_by_one_machine(self._reported_params, self.options.reported_params)
        )

    def _boost(
        self,
        booster: lightgbm.Booster,
        train: lightgbm.Dataset,
        agreement: Agreement,
        draws: RowDraws | None,
        leaves: Leaves | None,
        report: Report,
    ) -> lightgbm.Booster:
        options, history = self.options, self.history
        # LightGBM counts the iterations of `init_model` too.
        given = history.given_iterations
        total, rule = options.num_boost_round, StoppingRule.of(options)
        metrics_of_train = (
            TrainMetrics(booster, options, agreement.rows["train"], self.collective)
            if options.eval_train
            else None
        )
        env = CallbackEnv(
            model=booster,
            params={**options.params, **history.params},
            iteration=given,
            begin_iteration=given,
            end_iteration=given + total,
            evaluation_result_list=None,
        )
        first, model = len(history.rounds), booster
        for round_ in range(first, total):
            before = replace(env, iteration=given + round_)
            with _noting(booster, history.params):
                _call(options.callbacks, before, before_iteration=True)
            check_draws(booster, options)
            self._update(booster, train, draws, leaves, round_)
            model = booster
            if leaves is not None:
                leaves.after_round(None if draws is None else draws.mask(booster, round_))
                assert leaves.model is not None
                model = leaves.model
            if round_ == 0 and self._first_score is not None:
                self._first_score.add_to_first_trees(model)
            evaluations = evaluated(
                booster, options, train=metrics_of_train, collective=self.collective
            )
            history.rounds.append([e for e in evaluations if e.dataset_name != "train"])
            after = replace(before, model=model, evaluation_result_list=evaluations)
            best, is_over = None if rule is None else rule.best_if_over(history), False
            if round_ == first:
                _begin_records(options.callbacks, after)
            try:
                with _noting(booster, history.params):
                    _call(options.callbacks, after, before_iteration=False)
            except EarlyStopException as stop:
                best, is_over = stop.best_iteration + 1 - given, True
            if self.calls_back:
                by_rank = self.collective.all_gather((best, is_over))
                best = next((each for each, _ in by_rank if each is not None), None)
                is_over = any(each for _, each in by_rank)
            history.best_iteration = None if best is None else given + best
            history.is_over = is_over
            # Report after the decision to stop, so that this round's checkpoint holds it.
            metrics = {f"{e.dataset_name}-{e.metric_name}": e.metric_value for e in evaluations}
            report(round_ + 1, metrics, model)
            if best is not None:
                break
        return model

    def _estimated(self, agreement: Agreement, params: Mapping[str, Any]) -> FirstScore:
        """Estimate the initial score on rank 0 from all rows, as LightGBM in one process does."""
        rows = agreement.rows["train"]
        everybodys = self.collective.gather((rows.labels, rows.weights, rows.query_sizes))
        if everybodys is None:
            return FirstScore(self.collective.broadcast(None))
        labels, weights, sizes = map(one_after_another, zip(*everybodys, strict=True))
        # A network belongs to a thread: another thread of this rank is in none.
        score = by_itself(estimated, labels, weights, sizes, params)
        self.collective.broadcast(score.scores)
        return score

    def _update(
        self,
        booster: lightgbm.Booster,
        train: lightgbm.Dataset,
        draws: RowDraws | None,
        leaves: Leaves | None,
        round_: int,
    ) -> None:
        options, rate = self.options, {} if leaves is None else leaves.before_round()
        objective = options.objective

        def gradients(scores: Any, train: lightgbm.Dataset) -> Any:
            found = objective(scores, train)
            # Not earlier: in the first round LightGBM resets its parameters before it asks for
            # gradients, and draws columns again.
            reset_draws(booster, options, round_)
            self.in_step()
            return found

        fobj: Objective | None = None
        if callable(objective):
            fobj = gradients
        else:
            reset_draws(booster, options, round_, **rate)
        self.in_step()
        if draws is None:
            booster.update(fobj=fobj)
        else:
            draws.update(booster, train, round_, fobj)


def _warn(options: LightGBM, begins_with_model: bool) -> None:
    """Log which options LightGBM replaces, and which make a worse model."""
    if begins_with_model and options.init_score is not None:
        logger.warning(
            "LightGBM takes what the model to continue predicts in place of the initial scores in "
            "the column %r. Leave init_score out.",
            options.init_score,
        )
    if options.ignores_patience:
        logger.warning(
            "LightGBM doesn't stop early with boosting='dart', which changes earlier trees: the "
            "run has all of its rounds. Leave early_stopping_rounds out."
        )
    if options.averages_leaves:
        logger.warning(
            "LightGBM averages the leaves of its machines with %s and the objective %r: the model "
            "is worse if the workers' rows differ. Leave out %s, or shuffle the rows.",
            *(options.averages_leaves, options.objective, options.averages_leaves),
        )
    method = value(options.params, "monotone_constraints_method", "basic")
    if method != "basic" and value(options.params, "monotone_constraints"):
        logger.warning(
            "LightGBM's learner for several machines has no monotone_constraints_method=%r and "
            "takes 'basic', which finds fewer splits. Leave it out; or use XGBoost.",
            method,
        )


def _booster(
    params: dict[str, Any],
    datasets: Mapping[str, lightgbm.Dataset],
    model: lightgbm.Booster | None,
) -> lightgbm.Booster:
    with _acceptable(datasets["train"]):
        booster = lightgbm.Booster(params, datasets["train"])
    if model is not None:
        merge(booster, model)
    booster.set_train_data_name("train")
    for name, dataset in datasets.items():
        if name != "train":
            booster.add_valid(dataset, name)
    return booster


@contextmanager
def _acceptable(train: lightgbm.Dataset) -> Iterator[None]:
    """Let a booster start although all labels or weights on this machine are 0.

    Some objectives refuse that, though only the sum over all machines matters. One row gets the
    smallest float32 above 0 until the booster exists; it reads the fields again in every round.
    """
    fields = (field_of(train, name) for name in ("label", "weight"))
    zeros = [values for values in fields if values is not None and not values.any()]
    for values in zeros:
        values[-1] = np.finfo(np.float32).tiny
    yield
    for values in zeros:
        values[-1] = 0


@contextmanager
def _noting(booster: lightgbm.Booster, notes: dict[str, Any]) -> Iterator[None]:
    """Note the parameters that callbacks set meanwhile, since a saved model lacks them."""
    before = dict(booster.params)
    yield
    changed = {
        own_name(name): np.asarray(its).tolist()
        for name, its in booster.params.items()
        if before.get(name) is not its
    }
    notes.update(changed)
    # The user may have given a parameter by another of its names.
    booster.params.update(changed)


def _begin_records(callbacks: Iterable[Any], env: CallbackEnv) -> None:
    """Start LightGBM's `record_evaluation` callbacks at this round, which may not be round 0."""
    for callback in callbacks:
        if is_recording(callback):
            begin_record(callback, env)


def _call(callbacks: Iterable[Any], env: CallbackEnv, *, before_iteration: bool) -> None:
    """Call the user's callbacks before or after a round, in LightGBM's order."""
    mine = [
        each for each in callbacks if getattr(each, "before_iteration", False) == before_iteration
    ]
    for callback in sorted(mine, key=lambda each: getattr(each, "order", 0)):
        callback(env)
