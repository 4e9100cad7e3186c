"""Decides when to end a run before its training does: `RunConfig.stop`, `time_budget_s`. Pure."""

from __future__ import annotations

import math
import operator
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from polytrain.config.configs import CheckpointConfig, RunConfig
from polytrain.text.described import plain
from polytrain.text.metrics import copied, is_good_when_small, named_metric
from polytrain_plugins import Report, Stopped
from polytrain_plugins.type_names import quoted

STEP = "training_iteration"
"""The name of the step among the limits, as in Ray Tune."""

Comparison = Literal["<=", ">=", "<", ">"]

_COMPARES: Mapping[Comparison, Callable[[Any, Any], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}

_TEXT = re.compile(r"\s*(<=|>=|<|>)\s*(\S+)\s*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A limit of one metric, or of the step."""

    metric: str
    comparison: Comparison
    value: float

    def is_met(self, step: int, metrics: Mapping[str, Any]) -> float | None:
        """Return the report's value if it meets the limit, else None."""
        try:
            value = step if self.metric == STEP else named_metric(metrics, self.metric)
        except KeyError:
            return None
        # NaN meets no limit: every comparison with it is False.
        is_number = isinstance(value, int | float)
        return value if is_number and _COMPARES[self.comparison](value, self.value) else None

    def __str__(self) -> str:
        return f"{self.metric} {self.comparison} {self.value:.15g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRule:
    """The conditions of a run; the first that is met ends it."""

    limits: tuple[Limit, ...] = ()
    function: Callable[[Report], bool] | None = None
    time_budget_s: float | None = None

    @property
    def reads_reports(self) -> bool:
        """Whether a report can end the run."""
        return bool(self.limits) or self.function is not None

    @property
    def last_step(self) -> int | None:
        """The step at which a limit of the step ends the run; None without such a limit."""
        by_number = {">=": math.ceil, ">": lambda value: math.floor(value) + 1}
        steps = [
            max(1, by_number[limit.comparison](limit.value))
            for limit in self.limits
            if limit.metric == STEP and limit.comparison in by_number
        ]
        return min(steps, default=None)

    def met_by(self, report: Report) -> Stopped | None:
        """Return how a report of rank 0 ends the run; None if it doesn't.

        Raises:
            Exception: the function fails, see `answers_true`.
        """
        stopped = self.limit_met_by(report.step, report.metrics)
        function = self.function
        if stopped is not None or function is None:
            return stopped
        own = replace(report, metrics=copied(report.metrics))
        if answers_true(function, own, option="RunConfig.stop", given=report):
            name = known_as(function)
            reason = f"{name} returned True at step {report.step}"
            return Stopped(by="condition", reason=reason, condition=name, step=report.step)
        return None

    def limit_met_by(self, step: int, metrics: Mapping[str, Any]) -> Stopped | None:
        """Return how the first limit that these metrics meet ends the run; None if none does."""
        for limit in self.limits:
            value = limit.is_met(step, metrics)
            if value is not None:
                where = "" if limit.metric == STEP else f", which was {value:.15g} at step {step}"
                return Stopped(
                    by="condition",
                    reason=f"{limit}{where}",
                    condition=str(limit),
                    metric=limit.metric,
                    step=step,
                    value=value,
                )
        return None

    def budget_met_by(self, trained_s: float, *, step: int) -> Stopped | None:
        """Return how the spent time budget ends the run; None if some of it is left.

        Args:
            trained_s: `Ledger.trained_s` of the run, in seconds.
        """
        if self.time_budget_s is None or trained_s < self.time_budget_s:
            return None
        condition = f"time_budget_s={self.time_budget_s:.15g}"
        return Stopped(
            by="condition",
            reason=f"{condition}, after {trained_s:.1f} s of training at step {step}",
            condition=condition,
            step=step,
            value=trained_s,
        )


def known_as(function: Any) -> str:
    """Return the name of a user's function, for people."""
    return getattr(function, "__qualname__", type(function).__name__)


def answers_true(function: Callable[[Any], Any], argument: Any, *, option: str, given: Any) -> bool:
    """Call a user's function, and return its answer.

    Args:
        option: the field that has it.
        given: the last report or metrics in `argument`.

    Raises:
        TypeError: the answer is neither True nor False.
        RuntimeError: it has called `sys.exit`, which would end the training function as well, with
            code 0 as if the run were complete.
        Exception: whatever the function raises.
    """
    try:
        answer = plain(function(argument))
    except SystemExit as exit:
        raise RuntimeError(
            f"{option}: {known_as(function)} has called sys.exit for {given!r}. Return True or "
            "False, or raise an exception."
        ) from exit
    if not isinstance(answer, bool):
        raise TypeError(
            f"{option}: {known_as(function)} has to return True or False, and returned {answer!r} "
            f"for {given!r}."
        )
    return answer


def stop_rule(config: RunConfig) -> StopRule:
    """Return the rule of a configuration in which `stop_problems` finds no problem."""
    stop: Any = config.stop
    limits: tuple[Limit, ...] = ()
    if isinstance(stop, Mapping):
        limits = tuple(
            limit_of(name, given, config.checkpoint_config) for name, given in stop.items()
        )
    return StopRule(
        limits=limits,
        function=stop if callable(stop) else None,
        time_budget_s=config.time_budget_s,
    )


def limit_of(name: str, given: Any, checkpoints: CheckpointConfig) -> Limit:
    """Return the limit that a user means; a number alone is a value for training to reach.

    Args:
        given: a number, or a text such as "<= 0.1".
        checkpoints: decides whether small or large values are good, if the metric ranks them.

    Raises:
        ValueError: `given` is neither, or isn't finite.
    """
    comparison: Comparison = "<=" if _shrinks(name, checkpoints) else ">="
    value = given
    if isinstance(given, str):
        matched = _TEXT.fullmatch(given)
        if matched is None:
            raise ValueError(f"{quoted(given)} is not a limit")
        comparison, value = matched[1], _number(matched[2])  # type: ignore[assignment]  # by the pattern
    if not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise ValueError(f"{quoted(given)} is not a limit")
    return Limit(metric=name, comparison=comparison, value=value)


def _shrinks(name: str, checkpoints: CheckpointConfig) -> bool:
    """Return whether training should make a metric smaller."""
    if name == checkpoints.checkpoint_score_attribute:
        return checkpoints.checkpoint_score_order == "min"
    return is_good_when_small(name)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
