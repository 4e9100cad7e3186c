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
    history.continued_by([SetsARate(), stops])
    history.params, history.is_over = {"eta": 1e-6}, True
    history.continued_by(later)
    assert (history.params, history.is_over) == (({"eta": 1e-6}, True) if lasts else ({}, False))
