"""Which rank doesn't hand in its part of a checkpoint, and from when on that is certain."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polytrain.checkpoint.parts import PartTracker

TIMEOUT_S = 10.0


@dataclass
class Watched:
    """An attempt of ranks, of which everything is remembered, and what is said about them."""

    world_size: int
    part_tracker: PartTracker = field(init=False)
    now: float = 1000.0
    counts: list[int] = field(init=False)
    latest: list[float] = field(init=False)
    """When each rank handed in its latest part; when all began, if it hasn't."""

    done: set[int] = field(default_factory=set)
    waiting: set[int] = field(default_factory=set)
    """Those that have said that they would wait for their latest checkpoint."""

    def __post_init__(self) -> None:
        self.part_tracker = PartTracker(set(range(self.world_size)), TIMEOUT_S)
        self.counts = [0] * self.world_size
        self.latest = [self.now] * self.world_size

    def hand_in(self, *ranks: int, waits: bool = False) -> None:
        for rank in ranks:
            (self.waiting.add if waits else self.waiting.discard)(rank)
            self.counts[rank] += 1
            self.latest[rank] = self.now
            self.part_tracker.part_staged(rank, waits=waits, now=self.now)

    def end(self, *ranks: int) -> None:
        for rank in ranks:
            self.done.add(rank)
            self.part_tracker.done(rank, now=self.now)

    def overdue(self) -> tuple[int, str] | None:
        return self.part_tracker.overdue(now=self.now)

    @property
    def left_behind(self) -> bool:
        """Whether a rank has gone on to a later checkpoint than one is at, waits, or has ended."""
        stand_still = max((self.counts[rank] for rank in self.done | self.waiting), default=0)
        return max(self.counts) - min(self.counts) > 1 or stand_still > min(self.counts)


def reports(message: str) -> list[tuple[int, int]]:
    """The ranks that a complaint names with their counts; the one that is behind first."""
    found = re.search(r"rank (\d+) has reported (\d+) of them, and rank (\d+) (\d+)[;.]", message)
    assert found is not None, message
    behind, fewer, ahead, more = map(int, found.groups())
    return [(behind, fewer), (ahead, more)]


def assert_true(watched: Watched, overdue: tuple[int, str]) -> None:
    """What a complaint says is so."""
    rank, message = overdue
    (behind, fewer), (ahead, more) = reports(message)
    assert rank == behind
    assert (fewer, more) == (watched.counts[behind], watched.counts[ahead])
    assert (fewer, more) == (min(watched.counts), max(watched.counts))
    assert fewer < more
    if f"rank {rank} has ended" in message:
        assert rank in watched.done
    else:
        assert f"rank {rank} has reported none for {TIMEOUT_S:g} s" in message
        assert watched.now - watched.latest[rank] >= TIMEOUT_S


events = st.lists(
    st.tuples(
        st.sampled_from(["hand in", "hand in", "hand in", "hand in and wait", "end"]),
        st.integers(0, 3),
        st.sampled_from([0.0, 0.125, TIMEOUT_S / 2, TIMEOUT_S]),
    ),
    max_size=30,
)


@settings(max_examples=500)
@given(world_size=st.integers(1, 4), events=events)
def test_whatever_is_said_is_true_and_it_is_said_in_the_end(
    world_size: int, events: list[tuple[str, int, float]]
) -> None:
    watched = Watched(world_size)
    for what, number, seconds in events:
        watched.now += seconds
        rank = number % world_size
        if rank in watched.done:
            continue
        if what == "end":
            watched.end(rank)
        else:
            watched.hand_in(rank, waits=what == "hand in and wait")
        overdue = watched.overdue()
        if overdue is not None:
            assert_true(watched, overdue)
        if len(set(watched.counts)) == 1:
            assert overdue is None

    deadline = watched.part_tracker.deadline
    if watched.left_behind:
        # Whoever waits for the deadline, and looks again then, hears of it.
        assert deadline is not None
        assert deadline <= watched.now + TIMEOUT_S
        watched.now = max(watched.now, deadline)
        overdue = watched.overdue()
        assert overdue is not None
        assert_true(watched, overdue)
    else:
        watched.now += 100 * TIMEOUT_S
        overdue = watched.overdue()
        assert overdue is None or overdue[0] in watched.done


@given(world_size=st.integers(1, 4), checkpoints=st.integers(0, 3), data=st.data())
def test_ranks_that_hand_in_equally_many_are_never_complained_about(
    world_size: int, checkpoints: int, data: st.DataObject
) -> None:
    """In whatever order they do, as long as they keep within the patience of each other."""
    watched = Watched(world_size)
    parts = [rank for rank in range(world_size) for _ in range(checkpoints)]
    for rank in data.draw(st.permutations(parts)):
        watched.now += TIMEOUT_S / (2 * len(parts))
        watched.hand_in(rank)
        assert watched.overdue() is None
    for rank in data.draw(st.permutations(range(world_size))):
        watched.end(rank)
        assert watched.overdue() is None
    watched.now += 100 * TIMEOUT_S
    assert watched.overdue() is None
    assert watched.part_tracker.deadline is None


def test_a_rank_may_take_its_time_while_nobody_goes_on() -> None:
    watched = Watched(2)
    watched.hand_in(0)
    watched.now += 100 * TIMEOUT_S
    assert watched.overdue() is None


def test_a_rank_that_another_waits_for_has_a_time_to_catch_up() -> None:
    """Both may wait: one for the commit, the other for the first one in a collective."""
    watched = Watched(2)
    watched.hand_in(0, waits=True)
    watched.now += 0.99 * TIMEOUT_S
    assert watched.overdue() is None
    watched.now += 0.01 * TIMEOUT_S
    overdue = watched.overdue()
    assert overdue is not None
    assert reports(overdue[1]) == [(1, 0), (0, 1)]
    watched.hand_in(1)
    assert watched.overdue() is None


def test_a_rank_that_another_has_left_behind_has_a_time_to_catch_up() -> None:
    watched = Watched(2)
    watched.hand_in(0, 1, 0, 0)
    watched.now += 0.99 * TIMEOUT_S
    assert watched.overdue() is None
    watched.now += 0.01 * TIMEOUT_S
    overdue = watched.overdue()
    assert overdue is not None
    assert reports(overdue[1]) == [(1, 1), (0, 3)]


def test_a_rank_that_catches_up_has_the_whole_time_again() -> None:
    watched = Watched(2)
    watched.hand_in(0, 0)
    watched.now += 0.9 * TIMEOUT_S
    watched.hand_in(1, 0)
    watched.now += 0.9 * TIMEOUT_S
    assert watched.overdue() is None


def test_a_slow_rank_that_goes_on_is_not_complained_about() -> None:
    """However far the others are ahead: something comes of it."""
    watched = Watched(2)
    watched.hand_in(0, 0, 0, 0, 0, 0)
    for _ in range(4):
        watched.now += 0.9 * TIMEOUT_S
        watched.hand_in(1)
        assert watched.overdue() is None


def test_that_one_rank_goes_on_is_no_excuse_for_another() -> None:
    watched = Watched(3)
    watched.hand_in(0, 0, 0, 0, 0)
    for _ in range(2):
        watched.now += 0.5 * TIMEOUT_S
        watched.hand_in(1)
    overdue = watched.overdue()
    assert overdue is not None
    assert reports(overdue[1]) == [(2, 0), (0, 5)]


@pytest.mark.parametrize("first", [0, 1])
def test_a_rank_that_ends_with_a_part_too_few_is_reported_at_once(first: int) -> None:
    watched = Watched(2)
    watched.hand_in(0, 1, 0)
    watched.end(first)
    watched.end(1 - first)
    overdue = watched.overdue()
    assert overdue is not None
    rank, message = overdue
    assert rank == 1
    assert reports(message) == [(1, 1), (0, 2)]
    assert "rank 1 has ended" in message


def test_a_rank_that_lags_behind_one_that_has_ended_has_a_time_to_catch_up() -> None:
    watched = Watched(2)
    watched.hand_in(0)
    watched.end(0)
    watched.now += 0.9 * TIMEOUT_S
    assert watched.overdue() is None
    watched.hand_in(1)
    watched.now += TIMEOUT_S
    assert watched.overdue() is None
