"""Quantiles are XGBoost's own."""

from __future__ import annotations

import numpy as np
import pytest
import xgboost
from tests.plugin_xgboost.test_options import problems

from polytrain_xgboost.leaves import GrowingBooster, quantile


@pytest.mark.parametrize("alpha", [0.02, 0.1, 0.5, 0.9, 0.98])
@pytest.mark.parametrize("weighing", [None, 1.0, 0.3])
def test_a_quantile_is_that_of_xgboost(alpha: float, weighing: float | None) -> None:
    alpha = float(np.float32(alpha))
    generator = np.random.default_rng(0)
    for rows in range(2, 24):
        labels = generator.normal(size=rows).astype(np.float32)
        weights = None
        if weighing is not None:
            weights = (generator.integers(1, 4, rows) * weighing).astype(np.float32)
        data = xgboost.QuantileDMatrix(np.zeros((rows, 1)), label=labels, weight=weights)
        params = {"objective": "reg:quantileerror", "quantile_alpha": alpha, "eta": 1, "nthread": 1}
        model = xgboost.train({**params, "base_score": 0.0}, data, num_boost_round=1)
        assert quantile(labels, weights, alpha) == model.predict(data)[0]


def test_what_each_round_asks_of_a_booster_appends_no_trees(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That takes the longer, the more trees there are."""
    names = ["größe"]
    numbers = np.arange(8.0)
    data = xgboost.QuantileDMatrix(numbers.reshape(8, 1), label=numbers, feature_names=names)
    params = {"objective": "reg:absoluteerror", "base_score": 0.0}
    tree = xgboost.train(params, data, 1).save_raw("json")
    appended: list[int] = []
    append = GrowingBooster._append

    def noted(booster: GrowingBooster, texts: tuple[bytearray, ...]) -> None:
        appended.append(len(texts))
        append(booster, texts)

    monkeypatch.setattr(GrowingBooster, "_append", noted)
    booster = GrowingBooster(params, [data])
    for number in range(3):
        booster.append(tree)
        booster.set_attr(best_score=str(number))
        booster.set_param("learning_rate", 0.1)
        booster.save_config()
        assert booster.attr("best_score") == str(number)
        assert booster.num_boosted_rounds() == number + 1
    assert appended == []
    assert len(booster.get_dump()) == 3
    assert appended == [3]
    assert booster.attr("best_score") == "2"
    assert booster.feature_names == names


def test_vector_leaves_of_several_workers_are_refused() -> None:
    params = {
        "objective": "reg:quantileerror",
        "quantile_alpha": 0.5,
        "multi_strategy": "multi_output_tree",
    }
    [problem] = problems(label="y", params=params).values()
    assert problem.field == "params['multi_strategy']"
    assert "NaN on several workers" in problem.what
