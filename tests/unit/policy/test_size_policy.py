"""The number of workers of an elastic run: between the least and the most, whatever happens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from polytrain.policy.scaling import SizePolicy, holds
from polytrain.text.described import numbered

numbers = st.integers(0, 20)


@st.composite
def policies(draw: st.DrawFn) -> SizePolicy:
    least = draw(st.integers(1, 8))
    most = least + draw(st.integers(0, 8))
    return SizePolicy(least=least, most=most, standby=draw(st.integers(0, 3)))


@st.composite
def situations(draw: st.DrawFn) -> tuple[SizePolicy, int, int]:
    """A policy, the size of the last attempt, and the agents that are there now."""
    policy = draw(policies())
    return policy, draw(st.integers(policy.least, policy.most)), draw(numbers)


@given(policy=policies(), up=numbers, room=numbers)
def test_a_run_begins_with_what_there_is_room_for(policy: SizePolicy, up: int, room: int) -> None:
    size = policy.first(up=up, room=room)
    wanted = sorted((policy.least, room, policy.most))[1]
    assert (size is None) == (up < wanted)
    if size is not None:
        assert size.workers == wanted


@given(situations())
def test_no_size_is_out_of_bounds_or_has_more_workers_than_agents(
    situation: tuple[SizePolicy, int, int],
) -> None:
    policy, before, up = situation
    for size in (
        policy.after_loss(size=before, up=up),
        policy.after_place(size=before, up=up),
        policy.growth(size=before, up=up),
    ):
        if size is not None:
            assert policy.least <= size.workers <= min(policy.most, up)


@given(situations())
def test_a_run_waits_only_for_its_least_number(situation: tuple[SizePolicy, int, int]) -> None:
    policy, before, up = situation
    assert (policy.after_place(size=before, up=up) is None) == (up < policy.least)


@given(situations())
def test_a_run_does_not_grow_by_its_standbys(situation: tuple[SizePolicy, int, int]) -> None:
    policy, before, up = situation
    size = policy.growth(size=before, up=up)
    if up <= before + policy.standby or before == policy.most:
        assert size is None
    else:
        assert size is not None
        assert before < size.workers
        assert up - size.workers >= policy.standby


@given(situations(), st.integers(1, 8))
def test_a_loss_is_filled_from_standbys(situation: tuple[SizePolicy, int, int], lost: int) -> None:
    policy, before, _ = situation
    lost = min(lost, before)
    size = policy.after_loss(size=before, up=before - lost + policy.standby)
    left = min(before, before - lost + policy.standby)
    if left < policy.least:
        assert size is None
    else:
        assert size is not None
        assert size.workers == left
        found = "replaced" if left == before else f"{numbered(left, 'worker')} of {before} left"
        assert found in size.reason


def test_a_node_holds_a_worker_if_it_has_enough_of_everything() -> None:
    assert holds({"CPU": 2, "GPU": 1}, {"CPU": 2, "GPU": 1})
    assert not holds({"CPU": 64}, {"CPU": 2, "GPU": 1})
    assert not holds({}, {"CPU": 1})
