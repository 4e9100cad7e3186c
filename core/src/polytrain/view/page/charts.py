"""Which metrics share a chart, in which order, and which value of each is its best. Pure.

By their names: a metric of training and one of validation share a chart if their names are equal
without the word that says which they are, as "loss" and "val_loss", or "train/auc" and "eval/auc".
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from polytrain.text.metrics import is_good_when_small, words_of
from polytrain.view.page.curves import Metric

MOST_LINES = 4
"""Maximum number of metrics in one chart: the colours of more look alike."""

MAIN = 4
"""Metrics whose values stand above the charts."""

_ROLE = re.compile(
    r"(?:^|(?<=[/_\-.: ]))(?:training|train|validation|valid|val|eval|test|dev)(?:_?\d+)?"
    r"(?:[/_\-.: ]|$)",
    re.IGNORECASE,
)

_RISING = frozenset(
    {"acc", "auc", "aucpr", "f1", "precision", "recall", "r2", "ndcg", "map", "bleu", "rouge"}
    | {"iou", "dice", "reward", "score"}
)


class Better(StrEnum):
    """Which value of a metric is its best."""

    LOWEST = "lowest"
    HIGHEST = "highest"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """The metrics of one chart."""

    title: str
    metrics: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """What is said of a main metric above the charts."""

    name: str
    last: Any
    best: float | None
    """None if its name doesn't say whether it should fall or rise."""

    step: int | None
    """Where it was best."""

    spread: float
    """Between the lowest and the highest value."""


def charts_of(names: Sequence[str], scored: str | None = None) -> tuple[Chart, ...]:
    """Return the charts: first those by which a run is judged.

    Args:
        names: of the metrics that are drawn, in the order in which they were first reported.
        scored: the metric by which checkpoints are kept.
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(_base(name), []).append(name)
    ordered = sorted(
        groups.items(),
        key=lambda group: (scored not in group[1], better(group[0]) is None),
    )
    return tuple(
        Chart(
            title=base if len(group) > 1 else group[0], metrics=tuple(group[at : at + MOST_LINES])
        )
        for base, group in ordered
        for at in range(0, len(group), MOST_LINES)
    )


def headlines_of(
    metrics: Sequence[Metric], charts: Sequence[Chart], settings: Mapping[str, Any]
) -> tuple[Headline, ...]:
    """Return the main metrics: those of the first charts, or else the first ones.

    Args:
        metrics: all.
        charts: in their order.
        settings: options of the run's configs, by where they are set.
    """
    by_name = {metric.name: metric for metric in metrics}
    names = [name for chart in charts for name in chart.metrics] or list(by_name)
    scored, rises = score_of(settings)
    return tuple(
        _headline(by_name[name], rises if name == scored else better(name)) for name in names[:MAIN]
    )


def better(name: str) -> Better | None:
    """Return which value of a metric is its best, by its name; None if the name doesn't say."""
    words = words_of(name)
    if is_good_when_small(name) or any(word.endswith(("loss", "error")) for word in words):
        return Better.LOWEST
    if any(word in _RISING or word.endswith(("accuracy", "auc")) for word in words):
        return Better.HIGHEST
    return None


def score_of(settings: Mapping[str, Any]) -> tuple[str | None, Better]:
    """Return the metric by which checkpoints are kept, and which of its values is best."""
    of = "run_config.checkpoint_config.checkpoint_score"
    rises = settings.get(f"{of}_order", "max") == "max"
    return settings.get(f"{of}_attribute"), Better.HIGHEST if rises else Better.LOWEST


def _base(name: str) -> str:
    rest = _ROLE.sub("", name, count=1)
    # A name that is nothing but the word, such as "test", says no more without it.
    return rest.strip("/_-.: ").casefold() or name


def _headline(metric: Metric, direction: Better | None) -> Headline:
    best = {
        None: (None, None),
        Better.LOWEST: (metric.lowest, metric.lowest_step),
        Better.HIGHEST: (metric.highest, metric.highest_step),
    }[direction]
    return Headline(
        name=metric.name, last=metric.last, best=best[0], step=best[1], spread=metric.spread
    )
