"""Which report ends a run, by `RunConfig.stop` and `time_budget_s`."""

from __future__ import annotations

import dataclasses
import math
import pickle
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polytrain import CheckpointConfig, RunConfig
from polytrain.policy.stop_rule import Limit, StopRule, stop_rule
from polytrain_plugins import Report, Stopped

NUMBERS = st.floats(allow_nan=False) | st.integers(-(2**40), 2**40)
ORDERS = {
    "<=": lambda value, limit: value <= limit,
    ">=": lambda value, limit: value >= limit,
    "<": lambda value, limit: value < limit,
    ">": lambda value, limit: value > limit,
}


def report(step: int, **metrics: Any) -> Report:
    return Report(rank=0, attempt=0, step=step, metrics=metrics)


def met(
    stop: Any, step: int = 1, *, score: str | None = None, order: Any = "max", **metrics: Any
) -> Any:
    checkpoints = CheckpointConfig(checkpoint_score_attribute=score, checkpoint_score_order=order)
    rule = stop_rule(RunConfig(stop=stop, checkpoint_config=checkpoints))
    return rule.met_by(report(step, **metrics))


@given(
    values=st.lists(NUMBERS | st.just(math.nan), max_size=20),
    limit=st.floats(allow_nan=False, allow_infinity=False),
    order=st.sampled_from([*ORDERS]),
)
def test_the_first_report_beyond_the_limit_ends_the_run(
    values: list[float], limit: float, order: str
) -> None:
    rule = stop_rule(RunConfig(stop={"loss": f"{order} {limit!r}"}))
    found = [rule.met_by(report(step, loss=value)) for step, value in enumerate(values, 1)]
    expected = [ORDERS[order](value, limit) for value in values]
    assert [each is not None for each in found] == expected
    for step, (each, value) in enumerate(zip(found, values, strict=True), 1):
        if each is not None:
            assert (each.step, each.value, each.metric) == (step, value, "loss")


@given(limit=st.integers(1, 50), start=st.integers(0, 60))
def test_steps_are_counted_over_the_whole_run(limit: int, start: int) -> None:
    """A process that resumes ends with its first report if the limit lies before it."""
    rule = stop_rule(RunConfig(stop={"training_iteration": limit}))
    first = next(step for step in range(start + 1, 200) if rule.met_by(report(step)))
    assert first == max(limit, start + 1)


@pytest.mark.parametrize(
    ("stop", "metrics", "ends"),
    [
        ({"accuracy": 0.9}, {"accuracy": 0.9}, True),
        ({"accuracy": 0.9}, {"accuracy": 0.89}, False),
        ({"accuracy": np.float32(0.5)}, {"accuracy": 0.5}, True),
        ({"done": True}, {"done": True}, True),
        ({"done": True}, {"done": False}, False),
        ({"valid/loss": "<0.2"}, {"valid": {"loss": 0.1}}, True),
        ({"valid/loss": "<0.2"}, {"valid/loss": 0.1}, True),
        ({"valid/loss": "<0.2"}, {"valid": 0.1}, False),
        ({"loss": "<= 1e-3"}, {"loss": "0.0"}, False),
        ({"loss": "<= 1e-3"}, {"loss": None}, False),
        ({"loss": "<= 1e-3"}, {}, False),
        ({"a": 1, "b": 1}, {"a": 0, "b": 1}, True),
        ({"loss": 0.1}, {"loss": 0.05}, True),
        ({"loss": 0.1}, {"loss": 0.5}, False),
        ({"valid/rmse": 0.1}, {"valid": {"rmse": 0.1}}, True),
        ({"accuracy": 0.9}, {"accuracy": 0.95}, True),
        ({"accuracy": 0.9}, {"accuracy": 0.5}, False),
        ({"training_iteration": 9}, {"training_iteration": 100}, False),
    ],
)
def test_what_meets_a_limit(stop: Any, metrics: dict[str, Any], ends: bool) -> None:
    assert (met(stop, **metrics) is not None) == ends


def test_a_number_alone_is_where_the_score_is_to_come() -> None:
    assert met({"cost": 0.1}, score="cost", order="min", cost=0.05)
    assert not met({"cost": 0.1}, score="cost", order="min", cost=0.5)
    assert met({"cost": 0.1}, score="cost", order="max", cost=0.5)
    assert met({"cost": 0.1}, score="other", order="min", cost=0.5)


def test_the_result_says_which_condition_was_met_where_and_by_what() -> None:
    assert met({"loss": "<= 0.1"}, 57, loss=0.05) == Stopped(
        by="condition",
        reason="loss <= 0.1, which was 0.05 at step 57",
        condition="loss <= 0.1",
        metric="loss",
        step=57,
        value=0.05,
    )
    assert str(met({"tokens": 1234567}, 5, tokens=1234568)) == (
        "stopped by a condition: tokens >= 1234567, which was 1234568 at step 5"
    )
    assert str(met({"training_iteration": 1234567}, 1234567)) == (
        "stopped by a condition: training_iteration >= 1234567"
    )


def at_three(report: Report) -> bool:
    return report.step == 3


def test_a_function_gets_the_report() -> None:
    assert met(at_three, 2) is None
    found = met(at_three, 3)
    assert (found.condition, found.step, found.value) == ("at_three", 3, None)
    assert met(lambda report: np.bool_(report.metrics["x"] > 1), x=2)


def test_metrics_that_a_function_changes_are_its_own() -> None:
    """The report that it is asked about is stored afterwards."""
    metrics: dict[str, Any] = {"x": {"loss": 2}}
    assert met(lambda report: report.metrics["x"].pop("loss") > 1, **metrics)
    assert metrics == {"x": {"loss": 2}}


@pytest.mark.parametrize("answer", [None, 1, "yes", np.ones(2)])
def test_a_function_that_returns_something_else_fails(answer: Any) -> None:
    with pytest.raises(TypeError, match="has to return True or False"):
        met(lambda report: answer)


def test_a_function_that_exits_fails_and_ends_no_training_function() -> None:
    def leaves(report: Any) -> bool:
        sys.exit(0)

    called = r"^RunConfig\.stop: \S*leaves has called sys\.exit for "
    with pytest.raises(RuntimeError, match=called):
        met(leaves)


@pytest.mark.parametrize(("trained_s", "ends"), [(0.0, False), (59.99, False), (60.0, True)])
def test_a_time_budget(trained_s: float, ends: bool) -> None:
    found = StopRule(time_budget_s=60).budget_met_by(trained_s, step=7)
    assert (found is not None) == ends
    if found is not None:
        assert (found.condition, found.step, found.value) == ("time_budget_s=60", 7, 60.0)
    assert StopRule().budget_met_by(trained_s, step=7) is None
    long = StopRule(time_budget_s=1_234_567).budget_met_by(2e6, step=7)
    assert long is not None
    assert long.condition == "time_budget_s=1234567"


@pytest.mark.parametrize(
    ("stop", "last"),
    [
        ({"training_iteration": 100}, 100),
        ({"training_iteration": "> 99.5"}, 100),
        ({"training_iteration": ">= 99.5"}, 100),
        ({"training_iteration": "> 100", "loss": "<= 0.1"}, 101),
        ({"training_iteration": 0}, 1),
        ({"training_iteration": "<= 5"}, None),
        ({"loss": "<= 0.1"}, None),
        (None, None),
    ],
)
def test_the_step_that_ends_a_run_by_its_number(stop: Any, last: int | None) -> None:
    assert stop_rule(RunConfig(stop=stop)).last_step == last


def test_a_rule_travels_to_workers() -> None:
    rule = StopRule(limits=(Limit(metric="a", comparison="<", value=1),), function=at_three)
    assert pickle.loads(pickle.dumps(rule)) == rule
    assert not dataclasses.replace(rule, limits=(), function=None).reads_reports
