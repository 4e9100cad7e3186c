"""A random order that is computed, not stored."""

from __future__ import annotations

import math
from collections import Counter
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polytrain.data.plan.order import Permutation

keys = st.integers(-(2**63), 2**63 - 1)


@given(size=st.integers(1, 400), key=keys)
def test_it_has_everything_once(size: int, key: int) -> None:
    order = Permutation(size, key)
    assert sorted(order(np.arange(size, dtype=np.uint64)).tolist()) == list(range(size))


@given(size=st.integers(1, 2**62), key=keys, data=st.data())
def test_the_inverse_finds_the_place(size: int, key: int, data: st.DataObject) -> None:
    order = Permutation(size, key)
    place = data.draw(st.integers(0, size - 1))
    [number] = order(np.array([place], np.uint64)).tolist()
    assert 0 <= number < size
    assert order.inverse(number) == place


@given(size=st.integers(1, 10**12), key=keys, data=st.data())
def test_many_places_at_once_are_those_places_one_by_one(
    size: int, key: int, data: st.DataObject
) -> None:
    order = Permutation(size, key)
    places = data.draw(st.lists(st.integers(0, size - 1), max_size=20))
    at_once = order(np.array(places, dtype=np.uint64))
    one_by_one = [order(np.array([place], np.uint64)) for place in places]
    assert at_once.tolist() == [number for [number] in one_by_one]


def test_another_key_is_another_order() -> None:
    orders = {
        tuple(Permutation(50, *key)(np.arange(50, dtype=np.uint64)).tolist())
        for key in [(0,), (1,), (-1,), (0, 0), (0, 1)]
    }
    assert len(orders) == 5


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_all_orders_are_equally_likely(size: int) -> None:
    places = np.arange(size, dtype=np.uint64)
    orders = math.factorial(size)
    draws = 100 * orders
    counts = Counter(tuple(Permutation(size, 7, key)(places).tolist()) for key in range(draws))
    distance = sum((counts[order] - 100) ** 2 / 100 for order in permutations(range(size)))
    # A chi-squared variable has its degrees of freedom as mean and half its variance.
    freedom = orders - 1
    assert distance < freedom + 6 * math.sqrt(2 * freedom)
