"""Leaves some of the kit's tests of TensorFlow to `make sweep`."""

from __future__ import annotations

import pytest

ONLY_IN_SWEEP = {"test_chaos_by_chance", "test_chaos_that_does_not_end"}
"""Kills in training, which another test of the tier has in a fixed order. TensorFlow takes seconds
to begin an attempt; the other backends have these tests in `make test`, too."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.name == "test_tensorflow.py" and item.name in ONLY_IN_SWEEP:
            item.add_marker(pytest.mark.only_in_sweep)
