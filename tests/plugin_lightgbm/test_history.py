"""What early stopping remembers over a restart."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lightgbm.basic import EvalResult

from polytrain_lightgbm.backend import LightGBM
from polytrain_lightgbm.history import History, StoppingRule, has_ended

evaluations = st.builds(
    EvalResult,
    dataset_name=st.text(max_size=8),
    metric_name=st.text(max_size=8),
    metric_value=st.floats(allow_nan=False),
    maximize=st.booleans(),
    metric_std_dev=st.none() | st.floats(allow_nan=False),
)
histories = st.builds(
    History,
    rounds=st.lists(st.lists(evaluations, max_size=3), max_size=5),
    best_iteration=st.none() | st.integers(1, 10**6),
    params=st.dictionaries(st.text(max_size=8), st.floats(allow_nan=False) | st.text(max_size=8)),
    callbacks=st.lists(st.text(max_size=8), max_size=3),
    is_over=st.booleans(),
    given_iterations=st.integers(0, 10**6),
)


@settings(deadline=None)
@given(history=histories)
def test_a_history_is_read_as_it_was_written(history: History) -> None:
    again = History.from_json(history.to_json())
    assert again == history
    for round_ in again.rounds:
        assert all(isinstance(evaluation, EvalResult) for evaluation in round_)


def test_a_metric_that_is_not_a_number_is_kept() -> None:
    history = History(rounds=[[EvalResult("valid", "auc", math.nan, True)]])
    [[evaluation]] = History.from_json(history.to_json()).rounds
    assert math.isnan(evaluation.metric_value)


def test_a_new_history_is_empty_and_its_own() -> None:
    first, second = History(), History()
    first.rounds.append([])
    assert second == History(rounds=[], best_iteration=None)


def losses(**values: list[float]) -> list[list[EvalResult]]:
    """The rounds of these metrics of one data set."""
    return [
        [EvalResult("valid", name, loss, False) for name, loss in zip(values, round_, strict=True)]
        for round_ in zip(*values.values(), strict=True)
    ]


def stopped(rounds: list[list[EvalResult]], patience: int, **params: Any) -> int | None:
    """The best round by our rule, told after the round at which it ends; None if it never does."""
    history, rule = History(), StoppingRule(patience, total_rounds=100, params=params)
    for round_ in rounds:
        history.rounds.append(round_)
        best = rule.best_if_over(history)
        if best is not None:
            return best
    return None


@pytest.mark.parametrize(
    ("params", "best"),
    [
        ({}, 4),
        ({"first_metric_only": "false", "early_stopping_min_delta": "0.0"}, 4),
        ({"first_metric_only": True}, None),
        ({"first_metric_only": True, "early_stopping_min_delta": 0.5}, 1),
        ({"early_stopping_min_delta": 0.05}, 1),
    ],
    ids=str,
)
def test_early_stopping_heeds_lightgbms_own_parameters(
    params: dict[str, Any], best: int | None
) -> None:
    """The first metric improves a little for ever, the second only for four rounds."""
    slow = [1 - 0.01 * round_ for round_ in range(12)]
    fast = [1.0, 0.99, 0.98, 0.97, *[2.0] * 8]
    assert stopped(losses(slow=slow, fast=fast), 3, **params) == best


@pytest.mark.parametrize(("falling", "is_exhausted"), [([3, 2, 1, 1], False), ([3, 1, 2, 2], True)])
def test_rounds_that_are_over_are_no_early_stop(falling: list[float], is_exhausted: bool) -> None:
    """After the last round the best one is known in any case."""
    rule = StoppingRule(2, total_rounds=4, params={})
    assert rule.best_if_over(History(rounds=losses(loss=falling))) == 1 + falling.index(1)
    assert rule.is_exhausted == is_exhausted


@pytest.mark.parametrize("before", [[[]] * 3, losses(other=[0.1, 0.2]), losses(loss=[0.1], b=[1])])
def test_rounds_of_an_earlier_run_with_other_metrics_do_not_count(before: Any) -> None:
    rule = StoppingRule(2, total_rounds=100, params={})
    rounds = [*before, *losses(loss=[3, 2, 2, 2])]
    assert rule.best_if_over(History(rounds=rounds[:-1])) is None
    assert rule.best_if_over(History(rounds=rounds)) == len(before) + 2


@pytest.mark.parametrize(
    ("options", "is_over", "best"),
    [
        ({"early_stopping_rounds": 2}, False, 3),
        ({"early_stopping_rounds": 1}, False, 1),
        ({"early_stopping_rounds": 3}, False, None),
        ({}, False, None),
        ({"early_stopping_rounds": 3}, True, 3),
    ],
    ids=str,
)
def test_a_run_that_has_ended_ends_one_that_continues_it_by_that_ones_options(
    options: dict[str, Any], is_over: bool, best: int | None
) -> None:
    """The earlier one had a patience of two rounds."""
    rounds = losses(loss=[2, 3, 1, 4, 4])
    history = History(rounds=rounds, best_iteration=10 + 3, is_over=is_over, given_iterations=10)
    assert has_ended(history, LightGBM(num_boost_round=20, **options)) is (best is not None)
    assert history.best_iteration == 10 + (best or 3)


def test_a_run_that_a_callback_has_ended_need_not_have_metrics() -> None:
    history = History(rounds=[[], []], best_iteration=1)
    assert not has_ended(history, LightGBM(early_stopping_rounds=2))
