"""Which ranks hold something else than the others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polytrain.workers.session.replicas import odd_ranks, why_odd


@given(world_size=st.integers(1, 9), data=st.data())
def test_fewer_than_half_are_named(world_size: int, data: st.DataObject) -> None:
    odd = data.draw(st.sets(st.integers(0, world_size - 1), max_size=(world_size - 1) // 2))
    values = [
        f"wrong {data.draw(st.integers(0, 3))}" if n in odd else "right" for n in range(world_size)
    ]
    assert odd_ranks(values) == tuple(sorted(odd))


@pytest.mark.parametrize("values", ["ab", "aabb", "abc", "aabc"])
def test_nobody_is_named_if_no_value_is_that_of_most(values: str) -> None:
    odd = odd_ranks(values)
    assert odd == tuple(range(len(values)))
    assert "too few agree to tell which" in why_odd(odd, len(values), "'model'")


def test_ranks_are_counted_in_words() -> None:
    assert why_odd((1,), 3, "'model'").startswith("rank 1 of 3 holds other values of 'model'")
    assert why_odd((0, 2), 5, "'model'").startswith("ranks 0, 2 of 5 hold other values of 'model'")
