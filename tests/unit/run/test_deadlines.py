"""A driver that blocks on its mailbox acts in time without an event."""

from __future__ import annotations

from polytrain.run.deadlines import Deadline, Deadlines


def test_without_a_deadline_there_is_no_limit() -> None:
    deadlines = Deadlines()
    assert deadlines.left_s(now=5.0) is None
    assert list(deadlines.passed(now=5.0)) == []


def test_the_nearest_deadline_limits_the_wait_and_passes_once() -> None:
    deadlines = Deadlines()
    deadlines.set(Deadline.RANKS, 30.0)
    deadlines.set(Deadline.PARTS, 20.0)
    assert deadlines.left_s(now=12.0) == 8.0
    assert list(deadlines.passed(now=19.9)) == []
    assert list(deadlines.passed(now=20.0)) == [Deadline.PARTS]
    assert list(deadlines.passed(now=21.0)) == []
    assert deadlines.left_s(now=31.0) == 0.0


def test_a_deadline_is_moved_and_taken_back() -> None:
    deadlines = Deadlines()
    deadlines.set(Deadline.RANKS, 10.0)
    deadlines.set(Deadline.RANKS, 20.0)
    assert deadlines.left_s(now=10.0) == 10.0
    deadlines.set(Deadline.RANKS, None)
    assert deadlines.left_s(now=30.0) is None


def test_what_is_set_while_others_are_handled_waits_for_new_events() -> None:
    """Otherwise a look that wants another look at once would keep the driver from its mailbox."""
    deadlines = Deadlines()
    deadlines.set(Deadline.PARTS, 1.0)
    handled = []
    for deadline in deadlines.passed(now=2.0):
        handled.append(deadline)
        for again in (Deadline.PARTS, Deadline.RANKS):
            deadlines.set(again, 2.0)
    assert handled == [Deadline.PARTS]
    assert list(deadlines.passed(now=2.0)) == [Deadline.PARTS, Deadline.RANKS]
