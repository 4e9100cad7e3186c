"""The gradients for several classes are XGBoost's own, but for rounding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import xgboost

from polytrain_xgboost import rounds
from polytrain_xgboost.rounds import softmax_of

ROWS = 400


@pytest.mark.parametrize("objective", ["multi:softprob", "multi:softmax"])
@pytest.mark.parametrize("has", ["", "weights", "margins", "a class that no row has"])
def test_trees_are_those_of_xgboost(
    monkeypatch: pytest.MonkeyPatch, objective: str, has: str
) -> None:
    monkeypatch.setattr(rounds, "_BLOCK", 64)
    generator = np.random.default_rng(0)
    features = generator.normal(size=(ROWS, 3))
    label = np.digitize(features[:, 0] + features[:, 1], [-0.5, 0.5])
    classes = 4 if has == "a class that no row has" else 3
    fields: dict[str, Any] = {}
    if has == "weights":
        fields["weight"] = generator.integers(0, 4, ROWS)
    if has == "margins":
        # The probabilities of some rows are 0 and 1.
        fields["base_margin"] = generator.normal(size=(ROWS, classes)) * 60
    data = xgboost.DMatrix(features, label=label, **fields)
    params = {"objective": objective, "num_class": classes, "max_depth": 3, "base_score": 0.5}
    boosters = [xgboost.Booster(params, [data]) for _ in range(2)]
    all_rows = softmax_of(np.ones(ROWS, bool), classes=classes)
    for round_ in range(5):
        boosters[0].update(data, round_)
        boosters[1].update(data, round_, all_rows)
    own, these = (booster.predict(data, output_margin=True) for booster in boosters)
    np.testing.assert_allclose(these, own, atol=1e-4)


def test_a_single_class_trains() -> None:
    data = xgboost.DMatrix(np.ones((4, 1)), label=np.zeros(4))
    booster = xgboost.Booster({"objective": "multi:softprob", "num_class": 1}, [data])
    scores = booster.predict(data, output_margin=True)
    gradients, _ = softmax_of(np.ones(4, bool), classes=1)(scores, data)
    assert gradients.tolist() == [[0.0]] * 4


def test_rows_that_are_not_drawn_count_nothing_and_sure_ones_a_little() -> None:
    """As XGBoost's own do; of rows that aren't drawn, even a tiny hessian would round sums."""
    data = xgboost.DMatrix(np.zeros((3, 1)), label=[0, 1, 1])
    scores = np.array([[200, -200], [200, -200], [0, 0]], np.float32)
    gradients, hessians = softmax_of(np.array([True, True, False]), classes=2)(scores, data)
    assert gradients.tolist() == [[0, 0], [1, -1], [0, 0]]
    assert hessians.tolist() == [[np.float32(1e-16)] * 2] * 2 + [[0, 0]]
