"""At which steps a training's state is copied."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polytrain.policy.copies import CopyPace


@pytest.mark.parametrize("every", [1, 3])
def test_a_number_is_that_of_steps(every: int) -> None:
    pace, copied = CopyPace(every=every), []
    for step in range(1, 10):
        if pace.is_due(float(step)):
            copied.append(step)
            pace.copied(float(step), step + 0.5)
    assert copied == list(range(every, 10, every))


@given(
    st.lists(
        st.tuples(
            st.floats(0.001, 10).map(lambda each: round(each, 3)),
            st.floats(0.001, 10).map(lambda each: round(each, 3)),
        ),
        min_size=1,
        max_size=50,
    )
)
def test_copies_take_a_bounded_share_of_the_time_between_them(
    steps: list[tuple[float, float]],
) -> None:
    """Of a step and of a copy after it, the seconds: all copies but the last are paid for."""
    pace = CopyPace(every="auto")
    now = last = 0.0
    spent = 0.0
    for step, copy in steps:
        now += step
        if pace.is_due(now):
            assert spent <= 0.03 * now + 1e-9
            spent, last = spent + copy, copy
            pace.copied(now, now + copy)
            now += copy
    assert spent - last <= 0.03 * now + 1e-9


def test_the_first_step_is_copied() -> None:
    assert CopyPace(every="auto").is_due(5.0)


def shared(*, copy_s: float, steps: int, pace: CopyPace) -> list[int]:
    """Return after which of the next steps of a second each the state is copied."""
    now, at = 0.0, []
    for step in range(1, steps + 1):
        now += 1
        if pace.is_due(now):
            at.append(step)
            pace.copied(now, now + copy_s)
            now += copy_s
    return at


def test_ranks_that_copy_together_go_by_steps_alone() -> None:
    fast, slow = (CopyPace(every="auto", is_shared=True) for _ in range(2))
    assert shared(copy_s=0.001, steps=20, pace=fast) == [1, 3, 7, 15]
    assert shared(copy_s=9.0, steps=20, pace=slow) == [1, 3, 7, 15]


def test_ranks_that_agree_spend_the_share_of_the_slowest() -> None:
    fast, slow = (CopyPace(every="auto", is_shared=True) for _ in range(2))
    shared(copy_s=0.1, steps=7, pace=fast)
    shared(copy_s=0.3, steps=7, pace=slow)
    # 0.3 s in 10 s are three percent.
    assert (fast.wanted, slow.wanted) == (4, 10)
    for pace in (fast, slow):
        pace.agree([fast.wanted, slow.wanted])
    assert shared(copy_s=0.1, steps=30, pace=fast) == [10, 20, 30]
    assert shared(copy_s=0.3, steps=30, pace=slow) == [10, 20, 30]


def test_nothing_is_agreed_before_a_rank_has_timed_its_steps() -> None:
    pace = CopyPace(every="auto", is_shared=True)
    assert shared(copy_s=9.0, steps=1, pace=pace) == [1]
    pace.agree([pace.wanted, pace.wanted])
    assert shared(copy_s=9.0, steps=20, pace=pace) == [2, 6, 14]


@pytest.mark.parametrize("is_shared", [False, True])
def test_what_a_copy_makes_the_next_step_wait_is_its_cost(is_shared: bool) -> None:
    """Steps take a second, and a copy 0.03 s; the next step waits 0.27 s for another rank's."""
    pace = CopyPace(every="auto", is_shared=is_shared)
    now, waits, at = 0.0, 0.0, []
    for step in range(1, 100):
        now, waits = now + 1 + waits, 0.0
        if pace.is_due(now):
            at.append(step)
            pace.copied(now, now + 0.03)
            now, waits = now + 0.03, 0.27
            pace.agree([pace.wanted] if len(at) == 3 and is_shared else [0])
    # 0.3 s in 10 s are three percent.
    assert {later - earlier for earlier, later in pairwise(at[-4:])} == {10}


def test_a_cheap_copy_is_made_after_each_step_once_a_step_is_timed() -> None:
    pace, at = CopyPace(every="auto"), []
    for step in range(1, 8):
        if pace.is_due(float(step)):
            at.append(step)
            pace.copied(float(step), step + 0.001)
    assert at == [1, 3, 4, 5, 6, 7]
