"""The gradients for several classes are XGBoost's own, but for rounding."""

from __future__ import annotations

import numpy as np
import pytest
import xgboost

from polytrain_xgboost.rounds import _softmax


@pytest.mark.parametrize("objective", ["multi:softprob", "multi:softmax"])
@pytest.mark.parametrize("weighted", [False, True])
def test_trees_are_those_of_xgboost(objective: str, weighted: bool) -> None:
    generator = np.random.default_rng(0)
    features = generator.normal(size=(400, 3))
    label = np.digitize(features[:, 0] + features[:, 1], [-0.5, 0.5])
    weight = generator.integers(1, 4, 400) if weighted else None
    data = xgboost.DMatrix(features, label=label, weight=weight)
    params = {"objective": objective, "num_class": 3, "max_depth": 3, "base_score": 0.5}
    boosters = [xgboost.Booster(params, [data]) for _ in range(2)]
    for round_ in range(5):
        boosters[0].update(data, round_)
        boosters[1].update(data, round_, _softmax)
    own, these = (booster.predict(data, output_margin=True) for booster in boosters)
    np.testing.assert_allclose(these, own, atol=1e-4)
