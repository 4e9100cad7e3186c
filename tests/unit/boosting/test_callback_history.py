"""What callbacks have done counts for whoever continues with the same ones."""

from __future__ import annotations

from typing import Any

import pytest

from polytrain.boosting.callback_history import CallbackHistory


class SetsARate:
    """Callbacks differ by their classes: each worker has objects of its own."""


def stops(env: Any) -> None:
    """A function is known by its name."""


@pytest.mark.parametrize(
    ("later", "lasts"),
    [
        ([SetsARate(), stops], True),
        ([stops, print, SetsARate()], True),
        ([stops], False),
        ([print], False),
        ([], False),
    ],
)
def test_what_callbacks_have_done_counts_with_the_same_ones(later: list[Any], lasts: bool) -> None:
    history = CallbackHistory()
    history.continued_by([SetsARate(), stops], {}, str)
    history.params, history.is_over = {"eta": 1e-6}, True
    history.continued_by(later, {}, str)
    assert (history.params, history.is_over) == (({"eta": 1e-6}, True) if lasts else ({}, False))


@pytest.mark.parametrize(
    ("now", "lasts"),
    [
        ({"learning_rate": 0.5}, True),
        ({"eta": 0.5, "seed": 1}, True),
        ({"eta": 0.1}, False),
        ({"seed": 0}, False),
    ],
)
def test_parameters_that_the_run_changes_are_the_runs(now: dict[str, Any], lasts: bool) -> None:
    """As `on_rollback` may do, to which a callback's earlier rate would be an obstacle."""
    history = CallbackHistory()
    history.continued_by([stops], {"eta": 0.5, "seed": 0}, own_name)
    history.params = {"learning_rate": "0.3"}
    history.continued_by([stops], now, own_name)
    assert history.params == ({"learning_rate": "0.3"} if lasts else {})
    history.continued_by([stops], now, own_name)
    assert history.params == ({"learning_rate": "0.3"} if lasts else {})


def test_a_function_as_a_parameter_leaves_no_trace() -> None:
    """Checkpoints of equal runs are equal, and its address is another in each process."""
    history = CallbackHistory()
    history.continued_by([], {"objective": stops, "eta": 0.5}, own_name)
    assert "objective" not in history.to_json()


def own_name(name: str) -> str:
    return {"learning_rate": "eta"}.get(name, name)
