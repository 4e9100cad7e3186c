"""Who is a straggler: the rank that works while the others wait for it."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polytrain.events.attempt import Load
from polytrain.policy.stragglers import StragglerDetector, stragglers

SHARE = st.floats(0, 1)


def named(*windows: Mapping[int, float], world_size: int | None = None) -> list[int]:
    before, last = windows
    found = stragglers(before, last, world_size=world_size or len(last))
    return [straggler.rank for straggler in found]


def test_the_one_that_works_while_the_other_waits_holds_it_up() -> None:
    window = {0: 0.41, 1: 0.97}
    [found] = stragglers(window, window, world_size=2)
    assert found.reason(host="10.0.0.7", window_s=30.0) == (
        "rank 1 on host 10.0.0.7 holds the others up: it was busy for 97% of the last 30 s, "
        "the others for 41%"
    )


@pytest.mark.parametrize(
    ("window", "why"),
    [
        ({0: 1.0, 1: 1.0}, "waiting spins, or the work is even"),
        ({0: 0.3, 1: 0.7}, "it waits too, for something else"),
        ({0: 0.6, 1: 0.97}, "the other has enough to do"),
        ({0: 0.1, 1: 0.7, 2: 0.97}, "one of the others has enough to do"),
        ({0: 1.0}, "there is nobody to hold up"),
    ],
)
def test_nobody_is_accused_where(window: Mapping[int, float], why: str) -> None:
    assert named(window, window) == [], why


def test_once_is_no_habit() -> None:
    slow, even = {0: 0.1, 1: 1.0}, {0: 0.9, 1: 0.9}
    assert named(even, slow) == []
    assert named(slow, even) == []
    assert named(slow, {0: 1.0, 1: 0.1}) == []


def test_of_many_ranks_several_may_hold_the_others_up() -> None:
    window = {rank: 0.2 for rank in range(8)} | {3: 0.9, 6: 1.0}
    assert named(window, window) == [3, 6]


def test_nobody_is_accused_while_something_of_a_rank_is_unknown() -> None:
    window = {0: 0.1, 1: 1.0}
    assert named(window, window, world_size=3) == []
    assert named({}, window) == []


@given(st.lists(st.tuples(SHARE, SHARE), min_size=2, max_size=12))
def test_who_is_accused_was_busier_than_most_in_both_windows(
    shares: list[tuple[float, float]],
) -> None:
    windows = [dict(enumerate(window)) for window in zip(*shares, strict=True)]
    accused = named(*windows)
    assert len(accused) <= len(shares) / 2
    for rank in accused:
        for window in windows:
            slower = [other for other in window if window[other] < window[rank]]
            assert window[rank] >= 0.8
            assert len(slower) >= (len(window) - 1) / 2


@given(st.lists(SHARE, min_size=2, max_size=3))
def test_of_few_ranks_one_at_most_is_accused(shares: list[float]) -> None:
    window = dict(enumerate(shares))
    assert len(named(window, window)) <= 1


def load(rank: int, window: int, busy: float, *, attempt: int = 0) -> Load:
    return Load(attempt=attempt, rank=rank, window=window, busy=busy)


def ranks_found(pace: StragglerDetector, *loads: Load) -> list[int]:
    return [straggler.rank for load in loads for straggler in pace.take(load)]


def test_a_straggler_is_named_once_in_a_generation() -> None:
    pace = StragglerDetector(attempt=0, world_size=2)
    windows = range(50)
    assert ranks_found(
        pace, *(load(r, w, busy) for w in windows for r, busy in ((0, 0.1), (1, 1.0)))
    ) == [1]


def test_windows_are_compared_with_each_other_whenever_they_are_reported() -> None:
    pace = StragglerDetector(attempt=0, world_size=2)
    assert ranks_found(pace, load(1, 0, 1.0), load(1, 1, 1.0), load(0, 0, 0.1)) == []
    assert ranks_found(pace, load(0, 1, 0.1)) == [1]


def test_a_window_that_a_rank_says_nothing_of_interrupts_the_comparison() -> None:
    pace = StragglerDetector(attempt=0, world_size=2)
    slow = [load(0, 0, 0.1), load(1, 0, 1.0), load(1, 1, 1.0), load(0, 2, 0.1), load(1, 2, 1.0)]
    assert ranks_found(pace, *slow) == []
    assert ranks_found(pace, load(0, 3, 0.1), load(1, 3, 1.0)) == [1]


def test_what_is_reported_of_a_dead_generation_doesnt_count() -> None:
    pace = StragglerDetector(attempt=1, world_size=2)
    old = [load(r, w, busy, attempt=0) for w in (0, 1) for r, busy in ((0, 0.1), (1, 1.0))]
    assert ranks_found(pace, *old) == []
