"""Leaves some of the kit's tests of some backends to `make sweep`."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

ONLY_IN_SWEEP: Mapping[str, frozenset[str]] = {
    # It takes seconds to begin an attempt, or to train at all. The other backends have these tests
    # in `make test`. TensorFlow's kills and rows have tests of their own, such as
    # `test_keras_copies` and `test_tensorflow_equality`.
    "TestTensorFlow": frozenset(
        {
            "test_chaos_in_training",
            "test_chaos_around_training",
            "test_chaos_by_chance",
            "test_chaos_that_does_not_end",
            "test_every_row_is_in_the_model",
            "test_each_row_counts_alike",
        }
    ),
    # XGBoost, the quickest framework, has all. These are killed in tests of their own.
    "TestTorch": frozenset(
        {"test_chaos_in_training", "test_chaos_around_training", "test_chaos_by_chance"}
    ),
    "TestLightGBM": frozenset(
        {"test_chaos_in_training", "test_chaos_around_training", "test_chaos_by_chance"}
    ),
    # Before training begins it is the other reference backend.
    "TestShardedReference": frozenset({"test_chaos_around_training"}),
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        of_class = item.parent.name if item.parent is not None else ""
        if item.name in ONLY_IN_SWEEP.get(of_class, ()):
            item.add_marker(pytest.mark.only_in_sweep)
