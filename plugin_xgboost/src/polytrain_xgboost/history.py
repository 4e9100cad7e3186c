"""The history of a run's rounds, saved beside the model, which doesn't hold it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from polytrain.boosting.callback_history import CallbackHistory

EvalsLog = dict[str, dict[str, list[float]]]
"""Metrics as XGBoost's callbacks get them: data set → metric → one number per round."""


class Score(NamedTuple):
    """One metric of one data set after one round."""

    dataset: str
    metric: str
    value: float


@dataclass(slots=True, kw_only=True)
class History(CallbackHistory):
    """The rounds of a run, and what the user's callbacks changed."""

    rounds: list[list[Score]] = field(default_factory=list)
    has_best: bool = False
    """Whether early stopping has put the best round into the model's attributes."""

    def evals_log(self) -> EvalsLog:
        """Return the metrics of all rounds."""
        log: EvalsLog = {}
        for scores in self.rounds:
            add_to(log, scores)
        return log

    @classmethod
    def from_json(cls, text: str) -> History:
        """Read what `to_json` wrote."""
        fields: Mapping[str, Any] = json.loads(text)
        rounds = [[Score(*score) for score in scores] for scores in fields["rounds"]]
        return cls(**{**fields, "rounds": rounds})


def add_to(log: EvalsLog, scores: Iterable[Score]) -> None:
    """Append one round's metrics to a log."""
    for dataset, metric, value in scores:
        log.setdefault(dataset, {}).setdefault(metric, []).append(value)
