"""What is wrong with the conditions that end a run: `RunConfig.stop`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from polytrain.config.configs import CheckpointConfig, RunConfig
from polytrain.functions.pickle_checks import pickle_problems
from polytrain.policy.stop_rule import STEP, is_good_when_small, limit_of
from polytrain.text.plain_values import is_whole
from polytrain.text.signatures import accepts, written
from polytrain_plugins import Problem
from polytrain_plugins.type_names import quoted

_FIELD = "RunConfig.stop"
_EXAMPLE = '{"loss": "<= 0.1", "training_iteration": 100}'

_TIMES = ("time_total_s", "time_this_iter_s", "time_since_restore")
"""Metrics that Ray Tune adds to each report, which are about time."""


def stop_problems(run: Any) -> Iterator[Problem]:
    """Yield what is wrong with a run's conditions.

    Args:
        run: what the user passed as `run_config`.
    """
    if not isinstance(run, RunConfig) or run.stop is None:
        return
    stop: Any = run.stop
    if isinstance(stop, Mapping):
        if not stop:
            yield Problem(
                field=_FIELD,
                what="it has no limit",
                remedy=f"Give limits, for example {_EXAMPLE}, or None",
            )
        for name, limit in stop.items():
            yield from _limit_problems(name, limit, run.checkpoint_config)
    elif callable(stop) and not isinstance(stop, type):
        yield from _function_problems(stop)
    else:
        yield Problem(
            field=_FIELD,
            what=f"{quoted(stop)} is neither limits nor a function",
            remedy=f"Give limits, for example {_EXAMPLE}, or a function of a report",
        )


def _limit_problems(name: Any, limit: Any, checkpoints: Any) -> Iterator[Problem]:
    field = f"{_FIELD}[{name!r}]"
    if not isinstance(name, str) or not name:
        yield Problem(
            field=field,
            what="it is not the name of a metric",
            remedy=f"Give names and limits, for example {_EXAMPLE}",
        )
        return
    if name == STEP:
        if not is_whole(limit) or limit < 1:
            yield Problem(
                field=field,
                what=f"{quoted(limit)} is not a number of steps",
                remedy="Give a whole number, 1 or more",
            )
        return
    if name in _TIMES:
        yield Problem(
            field=field,
            what="no report has the time of training",
            remedy="Use RunConfig(time_budget_s=…)",
        )
        return
    ranks = checkpoints if isinstance(checkpoints, CheckpointConfig) else CheckpointConfig()
    try:
        meant = limit_of(name, limit, ranks)
    except ValueError as error:
        yield Problem(
            field=field,
            what=str(error),
            remedy='Give a finite number, or a text such as "<= 0.1" or ">= 0.9"',
        )
        return
    if not isinstance(limit, str) and meant.comparison == ">=" and is_good_when_small(name):
        yield Problem(
            field=field,
            what=f"{limit!r} alone is the value to reach, and {name!r} has none: by its name it "
            'becomes smaller, and by CheckpointConfig(checkpoint_score_order="max") larger',
            remedy=f'Use checkpoint_score_order="min", or write "<= {limit:g}" or ">= {limit:g}"',
        )


def _function_problems(function: Any) -> Iterator[Problem]:
    if not accepts(function, None):
        yield Problem(
            field=_FIELD,
            what=f"{written(function)} is called with one argument, the report",
            remedy="Let it take one argument, a polytrain_plugins.Report: report.step, "
            "report.metrics",
        )
    yield from pickle_problems(
        _FIELD, function, remedy="Create such objects inside the function, or decide by the report"
    )
