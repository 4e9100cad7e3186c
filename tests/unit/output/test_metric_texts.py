"""Metrics in a line: the same text in a notebook, in a terminal and in `polytrain runs`."""

from __future__ import annotations

from typing import Any

import pytest

from polytrain.output.metric_texts import metrics_text


@pytest.mark.parametrize(
    ("metrics", "text"),
    [
        ({}, ""),
        ({"loss": 0.123456, "epoch": 3, "is_best": True}, "loss 0.1235, epoch 3, is_best True"),
        ({"eval": {"auc": 0.5}, "curve": [1, 2]}, "eval/auc 0.5"),
        ({name: 1 for name in "abcdef"}, "a 1, b 1, c 1, d 1, 2 more"),
        ({"a" * 30: "b" * 30}, f"{'a' * 23}… {'b' * 11}…"),
        ({"title\x1b[2J": "two\nlines"}, "title\\x1b[2J two\\nlines"),
    ],
)
def test_the_first_metrics_fit_into_a_line(metrics: dict[str, Any], text: str) -> None:
    assert metrics_text(metrics) == text
