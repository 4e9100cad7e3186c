"""Finds conditions that already end a run, and conditions that no report could meet. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from polytrain.functions.code_fingerprint import code_fingerprint
from polytrain.policy.named_metrics import named_metric
from polytrain.policy.stop_rule import STEP, StopRule
from polytrain.record.history import RunHistory
from polytrain.record.reports import Reports
from polytrain_plugins import Report, Stopped
from polytrain_plugins.close_names import did_you_mean


def already_met(rule: StopRule, history: RunHistory, *, start_step: int) -> Stopped | None:
    """Return the condition that a run meets without further training; None if it meets none.

    Args:
        rule: the conditions of this call of `fit()`.
        history: the history of earlier drivers.
        start_step: the step of the checkpoint from which training would resume; later reports
            are lost.
    """
    steps = history.history.steps()
    last = int(steps[-1]) if len(steps) else 0
    stopped = rule.budget_met_by(history.ledger.trained_s(), step=last)
    if stopped is not None:
        return stopped
    # A run that has ended by a condition may have no checkpoint.
    counts_until = math.inf if history.succeeded else start_step
    met = history.condition
    if met is not None and (met.step or 0) <= counts_until and _is_met_again(rule, met, history):
        return met
    if len(steps) and last <= counts_until:
        return rule.limit_met_by(last, history.history[-1])
    return None


def function_fingerprint(function: Callable[[Report], bool] | None) -> str | None:
    """Return the fingerprint of a function in `RunConfig.stop`; None if there is none."""
    return None if function is None else code_fingerprint(function)


def unreported(rule: StopRule, reports: Reports) -> Iterator[str]:
    """Yield a sentence for each limit of a metric that no report has as a number.

    Args:
        rule: the conditions.
        reports: rank 0's reports; if there are none, nothing is yielded.
    """
    if not len(reports):
        return
    known = reports.names()
    for limit in rule.limits:
        name = limit.metric
        if name == STEP or any(_is_number(metrics, name) for metrics in _with(reports, name)):
            continue
        names = ", ".join(map(repr, known)) or "none"
        yield (
            f"RunConfig.stop[{name!r}] was never met: no report of rank 0 had a number of this "
            f"name. The reported metrics are {names}. {did_you_mean(name, known)}".strip()
        )


def _is_met_again(rule: StopRule, met: Stopped, history: RunHistory) -> bool:
    """Return whether the value or function that ended the run also meets this rule."""
    if met.metric and met.value is not None and met.step is not None:
        return rule.limit_met_by(met.step, {met.metric: met.value}) is not None
    is_function = not met.metric and met.value is None
    return (
        is_function
        and rule.function is not None
        and function_fingerprint(rule.function) == history.stop_function
    )


def _with(reports: Reports, name: str) -> Iterator[Any]:
    known = reports.names()
    if name in known or name.partition("/")[0] in known:
        yield from reports


def _is_number(metrics: Any, name: str) -> bool:
    try:
        return isinstance(named_metric(metrics, name), int | float)
    except KeyError:
        return False
