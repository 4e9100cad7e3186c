"""Rows that are drawn are the same whoever holds them."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polytrain.boosting.sampling import drawn, of_rows, sample_of

ROWS = st.integers(1, 400)


@given(rows=ROWS, seed=st.integers(0, 9), round_=st.integers(0, 9), data=st.data())
def test_a_row_is_drawn_whichever_part_it_is_in(
    rows: int, seed: int, round_: int, data: st.DataObject
) -> None:
    whole = drawn(0.5, seed=seed, round_=round_, first=0, rows=rows)
    first = data.draw(st.integers(0, rows))
    part = data.draw(st.integers(0, rows - first))
    found = drawn(0.5, seed=seed, round_=round_, first=first, rows=part)
    assert found.tolist() == whole[first : first + part].tolist()


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_as_many_rows_are_drawn_as_the_rate_says(rate: float) -> None:
    rows = 100_000
    counts = [drawn(rate, seed=7, round_=r, first=0, rows=rows).sum() for r in range(3)]
    assert counts == pytest.approx([rate * rows] * 3, rel=0.03)


def test_rounds_and_seeds_draw_other_rows() -> None:
    draws = [
        drawn(0.5, seed=seed, round_=round_, first=0, rows=1000)
        for seed in range(3)
        for round_ in range(3)
    ]
    for index, one in enumerate(draws):
        for other in draws[:index]:
            # Independent coins agree half of the time.
            assert np.mean(one == other) == pytest.approx(0.5, abs=0.08)


@given(rows=st.integers(0, 2000), size=st.integers(1, 300), seed=st.integers(0, 9))
def test_a_sample_has_rows_of_every_part_of_the_data(rows: int, size: int, seed: int) -> None:
    sample = sample_of(rows, size, seed)
    assert len(sample) == min(rows, size)
    assert sample.tolist() == sorted(set(sample.tolist()))
    parts = [int(row) * len(sample) // rows for row in sample]
    assert all(abs(part - index) <= 1 for index, part in enumerate(parts))


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("shape", [(4,), (4, 3), (12,)], ids=["one score", "three scores", "flat"])
def test_rows_that_are_not_drawn_have_no_gradient(
    shape: tuple[int, ...], order: Literal["C", "F"]
) -> None:
    rows = np.array([1, 0, 1, 0], bool)
    partial = of_rows(lambda scores, _: (scores, 2 * scores), rows, order=order)
    gradient, hessian = partial(np.ones(shape), None)
    assert gradient.shape == hessian.shape == shape
    for of_row, drawn_, whole in zip(
        gradient.reshape(4, -1, order=order), rows, hessian.reshape(4, -1, order=order), strict=True
    ):
        assert {*of_row} == {float(drawn_)}
        assert {*whole} == {2.0 * drawn_}


def test_a_worker_without_rows_has_no_gradients() -> None:
    partial = of_rows(lambda scores, _: (scores, scores), np.zeros(0, bool), order="C")
    assert [each.shape for each in partial(np.ones(0), None)] == [(0,), (0,)]
