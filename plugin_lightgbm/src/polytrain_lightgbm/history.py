"""The state of early stopping, kept over restarts, and its rule, which is LightGBM's own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import lightgbm
from lightgbm.basic import EvalResult
from lightgbm.callback import CallbackEnv, EarlyStopException

from polytrain.boosting.callback_history import CallbackHistory
from polytrain_lightgbm.backend import LightGBM
from polytrain_lightgbm.parameters import is_true


@dataclass(slots=True, kw_only=True)
class History(CallbackHistory):
    """The state of early stopping and of callbacks, which LightGBM's model doesn't hold."""

    rounds: list[list[EvalResult]] = field(default_factory=list)
    """Each round's metrics of the evaluation sets, which decide when to stop. Metrics of "train"
    are left out: their last bits depend on the number of workers."""

    best_iteration: int | None = None
    """Number of the model's best iteration, from 1, once training has ended."""

    given_iterations: int = 0
    """Iterations of the user's model that the run continues; 0 without one."""

    @classmethod
    def from_json(cls, text: str) -> History:
        """Read what `to_json` wrote."""
        fields: Mapping[str, Any] = json.loads(text)
        rounds = [[EvalResult(*result) for result in round_] for round_ in fields["rounds"]]
        return cls(**{**fields, "rounds": rounds})


class StoppingRule:
    """Decides after every round whether to stop, from the history."""

    def __init__(self, patience: int, *, total_rounds: int, params: Mapping[str, Any]) -> None:
        """
        Args:
            patience: rounds without an improvement after which to stop.
            total_rounds: rounds of the run, restarts included.
            params: LightGBM's parameters; the rule uses `first_metric_only` and
                `early_stopping_min_delta`.
        """
        self._rule, self._endless = (
            lightgbm.early_stopping(
                patience,
                first_metric_only=is_true(params, "first_metric_only"),
                min_delta=float(params.get("early_stopping_min_delta", 0.0)),
                verbose=False,
            )
            for _ in range(2)
        )
        self._total_rounds = total_rounds
        self._first = 0
        self._seen = 0
        self.is_exhausted = False
        """Whether the rule would have ended a run of more rounds, too."""

    @classmethod
    def of(cls, options: LightGBM) -> StoppingRule | None:
        """Return a run's rule; None without one, or if LightGBM wouldn't follow it."""
        patience = options.early_stopping_rounds
        if patience is None or options.ignores_patience:
            return None
        return cls(patience, total_rounds=options.num_boost_round, params=options.params)

    def best_if_over(self, history: History) -> int | None:
        """Return the best round's number, from 1, if LightGBM would stop now; None otherwise.

        Args:
            history: the history up to the last round. Rounds before a restart are replayed, except
                those of an earlier run that had other metrics or data sets.
        """
        rounds = history.rounds
        if self._seen == 0:
            self._first = self._seen = _first_with_these_metrics(rounds)
        for round_ in range(self._seen, len(rounds)):
            self._seen += 1
            now = CallbackEnv(
                model=None,  # it names "train", which isn't in the history
                params={},
                iteration=round_,
                begin_iteration=self._first,
                end_iteration=self._total_rounds,
                evaluation_result_list=rounds[round_],
            )
            # After the last round LightGBM stops in any case.
            later = replace(now, end_iteration=self._total_rounds + 1)
            self.is_exhausted = _best(self._endless, later) is not None
            best = _best(self._rule, now)
            if best is not None:
                return best
        return None


def has_ended(history: History, options: LightGBM) -> bool:
    """Return whether early stopping or a callback has ended training, by this run's options.

    The history may be another run's, which had less patience. If this run's rule ends
    it, the best iteration becomes the one that the rule finds.
    """
    if history.best_iteration is None:
        return False
    if history.is_over:
        return True
    rule = StoppingRule.of(options) if history.rounds[-1] else None
    best = None if rule is None else rule.best_if_over(history)
    if rule is None or best is None or not rule.is_exhausted:
        return False
    history.best_iteration = history.given_iterations + best
    return True


def _best(rule: Any, env: CallbackEnv) -> int | None:
    """Return the best round's number, from 1, if a rule stops after this round."""
    try:
        rule(env)
    except EarlyStopException as stop:
        return int(stop.best_iteration) + 1
    return None


def _first_with_these_metrics(rounds: Sequence[list[EvalResult]]) -> int:
    """Return the number of the first round, from 0, since which metrics are those of the last."""
    first = len(rounds)
    while first > 0 and _metrics_of(rounds[first - 1]) == _metrics_of(rounds[-1]):
        first -= 1
    return first


def _metrics_of(results: Sequence[EvalResult]) -> list[tuple[str, str]]:
    return [(each.dataset_name, each.metric_name) for each in results]
