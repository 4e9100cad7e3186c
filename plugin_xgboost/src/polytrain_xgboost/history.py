"""The history of a run's rounds, saved beside the model, which doesn't hold it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

EvalsLog = dict[str, dict[str, list[float]]]
"""Metrics as XGBoost's callbacks get them: data set → metric → one number per round."""


class Score(NamedTuple):
    """One metric of one data set after one round."""

    dataset: str
    metric: str
    value: float


@dataclass(slots=True, kw_only=True)
class History:
    """The rounds of a run, and what the user's callbacks changed."""

    rounds: list[list[Score]] = field(default_factory=list)
    params: dict[str, str] = field(default_factory=dict)
    """Parameters that callbacks have set."""

    is_over: bool = False
    """Whether a callback has ended training."""

    has_best: bool = False
    """Whether early stopping has put the best round into the model's attributes."""

    def evals_log(self) -> EvalsLog:
        """Return the metrics of all rounds."""
        log: EvalsLog = {}
        for scores in self.rounds:
            add_to(log, scores)
        return log

    def to_json(self) -> str:
        """Return the history as JSON text."""
        fields = {"rounds": self.rounds, "params": self.params, "is_over": self.is_over}
        return json.dumps({**fields, "has_best": self.has_best})

    @classmethod
    def from_json(cls, text: str) -> History:
        """Read what `to_json` wrote."""
        fields: Mapping[str, Any] = json.loads(text)
        return cls(
            rounds=[[Score(*score) for score in scores] for scores in fields["rounds"]],
            params=fields["params"],
            is_over=fields["is_over"],
            has_best=fields["has_best"],
        )


def add_to(log: EvalsLog, scores: Iterable[Score]) -> None:
    """Append one round's metrics to a log."""
    for dataset, metric, value in scores:
        log.setdefault(dataset, {}).setdefault(metric, []).append(value)
