"""What early stopping remembers over a restart, and its rule, which is LightGBM's own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import lightgbm
from lightgbm.basic import EvalResult
from lightgbm.callback import CallbackEnv, EarlyStopException


@dataclass(slots=True, kw_only=True)
class History:
    """What early stopping has to remember; LightGBM's model doesn't hold it."""

    rounds: list[list[EvalResult]] = field(default_factory=list)
    """Of every round, the metrics of the data sets that decide when to stop: not those of "train",
    whose last bits depend on the workers."""

    best_iteration: int | None = None
    """Number of the model's best iteration, from 1, once early stopping has ended training."""

    given_iterations: int = 0
    """Those of the model that the run has added its own to."""

    def to_json(self) -> str:
        """The history as JSON text."""
        return json.dumps(
            {
                # Without the deviation over folds, which only cross-validation has.
                "rounds": [[list(result) for result in round_] for round_ in self.rounds],
                "best_iteration": self.best_iteration,
                "given_iterations": self.given_iterations,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> History:
        """Read what `to_json` wrote."""
        fields: Mapping[str, Any] = json.loads(text)
        rounds = [[EvalResult(*result) for result in round_] for round_ in fields["rounds"]]
        return cls(**{**fields, "rounds": rounds})


class StoppingRule:
    """Tells after every round whether to stop, from what a history holds."""

    def __init__(self, patience: int, *, total_rounds: int, params: Mapping[str, Any]) -> None:
        """
        Args:
            patience: rounds without an improvement after which to stop.
            total_rounds: of the run, restarts included.
            params: LightGBM's, of which two are about this.
        """
        self._rule = lightgbm.early_stopping(
            patience,
            first_metric_only=bool(params.get("first_metric_only", False)),
            min_delta=params.get("early_stopping_min_delta", 0.0),
            verbose=False,
        )
        self._total_rounds = total_rounds
        self._seen = 0

    def best_if_over(self, env: CallbackEnv, history: History) -> int | None:
        """The best round's number, from 1, if LightGBM would stop after the last; None if not.

        Args:
            env: of the last round.
            history: up to it. What came before a restart is replayed.
        """
        for round_ in range(self._seen, len(history.rounds)):
            self._seen += 1
            try:
                self._rule(
                    replace(
                        env,
                        iteration=round_,
                        begin_iteration=0,
                        end_iteration=self._total_rounds,
                        evaluation_result_list=history.rounds[round_],
                    )
                )
            except EarlyStopException as stop:
                return int(stop.best_iteration) + 1
        return None
