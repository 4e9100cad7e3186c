"""Percentiles are LightGBM's own."""

from __future__ import annotations

import lightgbm
import numpy as np
import pytest

from polytrain_lightgbm.leaves import percentile


@pytest.mark.parametrize("alpha", [0.02, 0.1, 0.5, 0.9, 0.98])
@pytest.mark.parametrize("weighing", [None, 1.0, 0.3])
def test_a_percentile_is_that_of_lightgbm(alpha: float, weighing: float | None) -> None:
    """Of one leaf of LightGBM's, with rows that weigh nothing, less than 1, and more."""
    alpha = float(np.float32(alpha))
    generator = np.random.default_rng(0)
    for rows in range(4, 24):
        labels = generator.normal(size=2 * rows).astype(np.float32)
        labels[rows:] += 9
        weights = None
        if weighing is not None:
            weights = (generator.integers(0, 4, 2 * rows) * weighing).astype(np.float32)
            weights[::rows] = 1
        x = np.repeat([[0.0], [1.0]], rows, axis=0)
        params = {"verbosity": -1, "min_data_in_bin": 1, "num_threads": 1}
        data = lightgbm.Dataset(x, labels, weight=weights, params=params)
        params |= {"objective": "quantile", "alpha": alpha, "num_leaves": 2, "learning_rate": 1}
        params |= {"boost_from_average": False, "min_data_in_leaf": 1}
        model = lightgbm.train(params, data, num_boost_round=1)
        [found] = model.predict([[0.0]])
        its_weights = None if weights is None else weights[:rows]
        assert percentile(labels[:rows].astype(float), its_weights, alpha) == pytest.approx(found)


def test_one_row_is_its_own_percentile() -> None:
    assert percentile(np.array([3.0]), None, 0.9) == 3
    assert percentile(np.array([3.0]), np.zeros(1), 0.9) == 3
