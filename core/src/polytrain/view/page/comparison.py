"""What differs between two runs. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from polytrain.view.page.curves import MOST_CURVES, Points
from polytrain.view.page.facts import Facts


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One thing that isn't the same."""

    name: str
    first: Any
    """In the first run; None if it isn't there."""

    second: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two runs, side by side. What is the same isn't there, but for times and metrics."""

    names: tuple[str, str]
    configuration: tuple[Difference, ...]
    """Configs, options, data sets and versions that differ."""

    outcome: tuple[Difference, ...]
    """State, reports, restarts and the like, the same or not."""

    seconds: tuple[Difference, ...]
    """By account, with the total last."""

    metrics: tuple[Difference, ...]
    """The last values."""


def comparison(first: Facts, second: Facts) -> Comparison:
    """Compare two runs."""
    last = [{metric.name: metric.last for metric in each.metrics} for each in (first, second)]
    seconds = [{**each.seconds, "wall_s": each.wall_s} for each in (first, second)]
    return Comparison(
        names=(first.source.name, second.source.name),
        configuration=tuple(
            each
            for each in _pairs(_configuration(first), _configuration(second))
            if not _same(each.first, each.second)
        ),
        outcome=tuple(_pairs(_outcome(first), _outcome(second))),
        seconds=tuple(_pairs(*seconds)),
        metrics=tuple(_pairs(*last)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlay:
    """One metric of both runs."""

    name: str
    curves: tuple[Points | None, Points | None]
    """None where a run has no such number."""


def overlays_of(first: Facts, second: Facts) -> tuple[Overlay, ...]:
    """Return the curves of two runs to draw over each other."""
    one, other = (
        {metric.name: metric.curve for metric in run.metrics if metric.curve is not None}
        for run in (first, second)
    )
    names = list({**one, **other})[:MOST_CURVES]
    return tuple(Overlay(name=name, curves=(one.get(name), other.get(name))) for name in names)


def _outcome(facts: Facts) -> Mapping[str, Any]:
    return {
        "state": facts.source.state,
        "workers": facts.workers,
        "reports": facts.reports,
        "restarts": facts.restarts,
        "lost_steps": facts.lost_steps,
        "goodput": facts.goodput,
    }


def _configuration(facts: Facts) -> Mapping[str, Any]:
    config = facts.training_config
    program = facts.programs[-1]
    in_function = config if isinstance(config, Mapping) else {"train_loop_config": config}
    return {
        **facts.settings,
        "backend": facts.backend,
        "command": shlex.join(program.command),
        "git commit": program.code,
        **{f"option {name}": value for name, value in facts.options.items()},
        **{f"train_loop_config {name}": value for name, value in in_function.items()},
        **{
            f"data set {name} {key}": value
            for name, options in facts.datasets.items()
            for key, value in options.items()
        },
        **{f"version {name}": value for name, value in facts.versions.items()},
    }


def _pairs(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[Difference]:
    for name in {**first, **second}:
        yield Difference(name=name, first=first.get(name), second=second.get(name))


def _same(first: Any, second: Any) -> bool:
    # NaN is unequal to itself.
    return bool(first == second) or repr(first) == repr(second)
