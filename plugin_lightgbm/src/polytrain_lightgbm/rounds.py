"""What happens after every boosting round: one metric for all ranks, a report, one decision."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import lightgbm
from lightgbm.callback import CallbackEnv, EarlyStopException

from polytrain_lightgbm.star import Star
from polytrain_plugins import Session


class Evaluation(NamedTuple):
    """One metric of one data set after one round, laid out as LightGBM's own."""

    dataset_name: str
    metric_name: str
    metric_value: float
    maximize: bool


@dataclass(slots=True, kw_only=True)
class History:
    """What early stopping has to remember over a restart; LightGBM's model doesn't hold it."""

    rounds: list[list[Evaluation]] = field(default_factory=list)
    best_iteration: int | None = None
    """Number of the best round, from 1, once early stopping has ended training."""

    def to_json(self) -> str:
        """The history as JSON text."""
        return json.dumps({"rounds": self.rounds, "best_iteration": self.best_iteration})

    @classmethod
    def from_json(cls, text: str) -> History:
        """Read what `to_json` wrote."""
        fields: Mapping[str, Any] = json.loads(text)
        rounds = [[Evaluation(*e) for e in round_] for round_ in fields["rounds"]]
        return cls(rounds=rounds, best_iteration=fields["best_iteration"])


class AfterRound:
    """A callback of `lightgbm.train`.

    Every rank holds all rows of the evaluation sets, so their metrics are those of all rows. Of the
    training data each holds its shard: what is reported is the mean over the ranks by weight of
    their rows. Rank 0 alone decides when to stop, and everybody hears it in the same round; left to
    themselves, ranks that stop in different rounds would wait for each other for ever.
    """

    order = 30
    before_iteration = False

    def __init__(
        self,
        *,
        session: Session,
        history: History,
        total_rounds: int,
        patience: int | None,
        star: Star | None,
        train_weight: float,
    ) -> None:
        self._session = session
        self._history = history
        self._total_rounds = total_rounds
        self._star = star
        self._train_weight = train_weight
        self._rule = (
            lightgbm.early_stopping(patience, verbose=False) if patience is not None else None
        )
        self._replayed = False

    def __call__(self, env: CallbackEnv) -> None:
        if not self._replayed:
            self._replay(env)
        evaluations = [self._over_all_ranks(result) for result in env.evaluation_result_list or []]
        self._history.rounds.append(evaluations)
        best = self._decide(self._best_if_stopping(env, len(self._history.rounds) - 1))
        self._history.best_iteration = best
        # After the decision, so that a checkpoint of this round knows of it.
        self._session.report(
            step=len(self._history.rounds),
            metrics={f"{e.dataset_name}-{e.metric_name}": e.metric_value for e in evaluations},
            model=env.model,
        )
        if best is not None:
            raise EarlyStopException(best - 1, evaluations)

    def _replay(self, env: CallbackEnv) -> None:
        """Bring the rule to where it was before the restart."""
        self._replayed = True
        for round_ in range(len(self._history.rounds)):
            self._best_if_stopping(env, round_)

    def _best_if_stopping(self, env: CallbackEnv, round_: int) -> int | None:
        """The best round's number, from 1, if LightGBM's own rule would stop after this one."""
        if self._rule is None:
            return None
        try:
            self._rule(
                replace(
                    env,
                    iteration=round_,
                    begin_iteration=0,
                    end_iteration=self._total_rounds,
                    evaluation_result_list=self._history.rounds[round_],
                )
            )
        except EarlyStopException as stop:
            return int(stop.best_iteration) + 1
        return None

    def _decide(self, best: int | None) -> int | None:
        if self._star is None or self._rule is None:
            return best
        [decided] = self._star.sum([float(best or 0) if self._session.world.me.rank == 0 else 0.0])
        return int(decided) or None

    def _over_all_ranks(self, result: Any) -> Evaluation:
        value = result.metric_value
        if result.dataset_name == "train" and self._star is not None:
            weighted, weight = self._star.sum([value * self._train_weight, self._train_weight])
            value = weighted / weight
        return Evaluation(
            dataset_name=result.dataset_name,
            metric_name=result.metric_name,
            metric_value=float(value),
            maximize=bool(result.maximize),
        )
