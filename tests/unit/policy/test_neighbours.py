"""On which host copies lie, and which ones are sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from polytrain.policy.copies import Sends, neighbours, to_keep

NODES = st.lists(st.sampled_from("abcd"), min_size=1, max_size=12)


def test_copies_lie_on_the_next_host_of_a_ring() -> None:
    assert neighbours(["a", "a", "b", "b", "c"]) == [2, 3, 4, 4, 0]
    assert neighbours(["a", "b"]) == [1, 0]


@given(NODES)
def test_no_copy_lies_on_its_own_host(nodes: Sequence[str]) -> None:
    for rank, other in enumerate(neighbours(nodes)):
        if len(set(nodes)) == 1:
            assert other is None
        else:
            assert other is not None
            assert nodes[other] != nodes[rank]


@given(NODES)
def test_one_host_keeps_the_copies_of_one_other(nodes: Sequence[str]) -> None:
    """So the loss of one host takes the copies of one other, whose own are still there."""
    senders: dict[str, set[str]] = {}
    for rank, other in enumerate(neighbours(nodes)):
        if other is not None:
            senders.setdefault(nodes[other], set()).add(nodes[rank])
    assert all(len(each) == 1 for each in senders.values())
    assert len(senders) == (len(set(nodes)) if len(set(nodes)) > 1 else 0)


def test_the_next_copy_is_sent_once_all_have_sent_the_last() -> None:
    sends = Sends(2)
    assert sends.sent(0, 5, newest=10) is None
    assert sends.sent(1, 5, newest=15) == 16


@given(st.integers(1, 8), st.integers(1, 40), st.data())
def test_all_ranks_send_the_same_copy_again_after_some_were_late(
    world_size: int, steps: int, data: st.DataObject
) -> None:
    """Each rank takes up to `steps` until it hears of a number, and copies every step."""
    sends, wanted, at = Sends(world_size), 0, [0] * world_size
    for _ in range(12):
        sent = []
        following = None
        for rank in range(world_size):
            at[rank] = max(at) if rank else at[rank]
            at[rank] += data.draw(st.integers(0, steps))
            number = max(wanted, at[rank])
            sent.append(number)
            following = sends.sent(rank, number, newest=max(number, at[rank]))
        assert following is not None
        assert following > max(sent)
        wanted = following
        at = [max(sent)] * world_size
        if len(set(sent)) == 1:
            return
    raise AssertionError("they never sent the same")


@dataclass
class Rank:
    """A rank that sends copies, and what its neighbour has of it."""

    whole: set[int] = field(default_factory=set)
    arrives: int | None = None
    at: int = 0
    orders: list[tuple[int, int | None]] = field(default_factory=lambda: [(0, None)])
    """From which number on to send the next copy, and which one all have."""


@given(st.integers(1, 4), st.data())
def test_once_all_have_a_copy_there_is_always_one_that_all_have(
    world_size: int, data: st.DataObject
) -> None:
    """In any order of messages, and however far some ranks are when they hear of a number."""
    sends, ranks = Sends(world_size), [Rank() for _ in range(world_size)]
    had_one = False
    for _ in range(data.draw(st.integers(0, 60))):
        index = data.draw(st.integers(0, world_size - 1))
        rank = ranks[index]
        if rank.arrives is not None:
            number, rank.arrives = rank.arrives, None
            rank.whole.add(number)
            following = sends.sent(index, number, newest=max(number, rank.at))
            if following is not None:
                for each in ranks:
                    each.orders.append((following, sends.common))
        elif rank.orders:
            wanted, common = rank.orders.pop(0)
            rank.at += data.draw(st.integers(0, 3))
            rank.arrives = rank.at = max(wanted, rank.at)
            rank.whole &= {to_keep(rank.whole, common)}
        has_one = bool(set.intersection(*(each.whole for each in ranks)))
        assert has_one or not had_one
        had_one = has_one
