"""What early stopping remembers over a restart."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lightgbm.basic import EvalResult
from lightgbm.callback import CallbackEnv

from polytrain_lightgbm.history import History, StoppingRule

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


def stopped(values: dict[str, list[float]], patience: int, **params: Any) -> int | None:
    """The best round by our rule, told after the round at which it ends; None if it never does."""
    env = CallbackEnv(
        model=None,  # type: ignore[arg-type]  # the rule doesn't look at it
        params=params,
        iteration=0,
        begin_iteration=0,
        end_iteration=100,
        evaluation_result_list=None,
    )
    history, rule = History(), StoppingRule(patience, total_rounds=100, params=params)
    for round_ in zip(*values.values(), strict=True):
        history.rounds.append(
            [EvalResult("valid", name, v, False) for name, v in zip(values, round_, strict=True)]
        )
        best = rule.best_if_over(env, history)
        if best is not None:
            return best
    return None


@pytest.mark.parametrize(
    ("params", "best"),
    [
        ({}, 4),
        ({"first_metric_only": False}, 4),
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
    values = {
        "slow": [1 - 0.01 * round_ for round_ in range(12)],
        "fast": [1.0, 0.99, 0.98, 0.97, *[2.0] * 8],
    }
    assert stopped(values, 3, **params) == best


@pytest.mark.parametrize(("losses", "is_exhausted"), [([3, 2, 1, 1], False), ([3, 1, 2, 2], True)])
def test_rounds_that_are_over_are_no_early_stop(losses: list[float], is_exhausted: bool) -> None:
    """After the last round the best one is known in any case."""
    env = CallbackEnv(
        model=None,  # type: ignore[arg-type]  # as above
        params={},
        iteration=3,
        begin_iteration=0,
        end_iteration=4,
        evaluation_result_list=None,
    )
    history = History(rounds=[[EvalResult("valid", "l2", loss, False)] for loss in losses])
    rule = StoppingRule(2, total_rounds=4, params={})
    assert rule.best_if_over(env, history) == 1 + losses.index(1)
    assert rule.is_exhausted == is_exhausted
