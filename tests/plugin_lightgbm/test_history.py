"""What early stopping remembers over a restart."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st
from lightgbm.basic import EvalResult

from polytrain_lightgbm.history import History

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
