"""How a run gets its agents: whom it requests, how long it waits, when it stops waiting."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polytrain.config.configs import ScalingConfig
from polytrain.errors import FailureKind
from polytrain.policy.autoscaling import Outlook
from polytrain.policy.placement import Departure, PlacementPolicy
from polytrain.policy.scaling import Starting

NOTHING_ADDED = Outlook(says="no autoscaler adds nodes to it")


def policy(num_workers: int | tuple[int, int], **scaling: Any) -> PlacementPolicy:
    return PlacementPolicy(scaling=ScalingConfig(num_workers=num_workers, **scaling))


def nodes(**cpus: float) -> dict[str, dict[str, float]]:
    return {name: {"CPU": amount} for name, amount in cpus.items()}


@pytest.mark.parametrize(("num_workers", "last"), [(1, 3), (8, 8)])
def test_agents_that_never_stay_are_not_requested_for_ever(num_workers: int, last: int) -> None:
    placement = policy(num_workers)
    assert placement.may_request(last)
    assert not placement.may_request(last + 1)
    assert placement.why_loss_is_final(FailureKind.AGENT_LOST, "it died", last) is None
    reason = placement.why_loss_is_final(FailureKind.AGENT_LOST, "it died", last + 1)
    assert reason == (
        f"{last + 1} agents in a row were lost before a worker could use them, the last: it died"
    )


def test_what_cannot_be_set_up_is_not_tried_again() -> None:
    assert policy(4).why_loss_is_final(FailureKind.STARTUP, "no such wheel", 1) == "no such wheel"


def test_workers_of_a_fixed_number_come_before_standbys() -> None:
    placement = policy(2, standby=1)
    assert placement.number_to_request(up=0, coming=0, is_placing=True) == 2
    assert placement.number_to_request(up=2, coming=0, is_placing=False) == 1
    assert placement.number_to_request(up=3, coming=1, is_placing=False) == 0


def test_an_elastic_run_requests_all_at_once() -> None:
    placement = policy((1, 4), standby=1)
    assert placement.number_to_request(up=1, coming=0, is_placing=True) == 4


def test_a_bundle_on_a_node_to_avoid_is_left_empty() -> None:
    placement = policy(3)
    assert placement.free_bundles({0}, {0: "a", 1: "b"}, avoided=set()) == [1, 2]
    assert placement.free_bundles({0}, {0: "a", 1: "b"}, avoided={"b"}) == [2]
    assert policy((1, 3)).free_bundles(set(), {}, avoided=set()) == []


def test_a_standby_avoids_ranks_if_another_node_has_room() -> None:
    placement = policy(1, standby=1)
    assert placement.nodes_without_standby({"a"}, nodes(a=1, b=1)) == {"a"}
    assert placement.nodes_without_standby({"a"}, nodes(a=1, b=0.5)) == frozenset()
    assert policy(1).nodes_without_standby({"a"}, nodes(a=1, b=1)) == frozenset()


@pytest.mark.parametrize(
    ("up", "coming", "size", "waits"),
    [(2, 1, 4, True), (4, 1, 4, False), (0, 1, 4, False), (2, 0, 4, False), (2, 1, 0, False)],
)
def test_a_smaller_run_waits_if_more_may_come(
    up: int, coming: int, size: int, *, waits: bool
) -> None:
    assert policy((1, 4)).is_worth_waiting(up=up, coming=coming, size=size) is waits


def test_agents_leave_if_other_nodes_hold_the_workers() -> None:
    departure = policy(2).departure({5: "a", 6: "b"}, {"a": math.inf}, nodes(a=4, b=2))
    assert departure == Departure(leaving=frozenset({5}), avoided=frozenset({"a"}))


def test_agents_stay_if_no_other_node_holds_the_workers() -> None:
    departure = policy(2).departure({5: "a", 6: "b"}, {"a": math.inf}, nodes(a=4, b=1))
    assert (departure.leaving, departure.avoided) == (frozenset(), frozenset())
    assert "1 agent stays on nodes that are to be left" in departure.reason


@pytest.mark.parametrize(("others", "says"), [({}, ""), ({"c": 1}, "1 agent stays on nodes")])
def test_agents_leave_a_node_that_goes_rather_than_one_that_is_avoided_for_a_while(
    others: dict[str, int], says: str
) -> None:
    avoid = {"a": 700.0, "b": math.inf}
    departure = policy(2).departure({5: "a", 6: "b"}, avoid, nodes(a=2, b=2, **others))
    assert (departure.leaving, departure.avoided) == (frozenset({6}), frozenset({"b"}))
    assert departure.reason.startswith(says)
    assert bool(departure.reason) == bool(says)


def test_nodes_without_agents_are_avoided() -> None:
    departure = policy(2).departure({5: "b"}, {"a": math.inf}, {})
    assert departure == Departure(leaving=frozenset(), avoided=frozenset({"a"}))


def test_a_run_that_nobody_makes_room_for_is_hopeless() -> None:
    placement = policy(3)
    why = placement.why_hopeless(
        Outlook(says="no nodes", refused=1),
        up_on=["a", "a"],
        coming=1,
        living=nodes(a=2),
        free=nodes(a=0),
    )
    assert why is not None
    assert why.startswith("3 workers of 1 CPU each; the cluster has 0 CPU free on 1 node; no nodes")
    assert "waiting doesn't help" in why


@pytest.mark.parametrize(
    ("refused", "free"), [(0, 0.0), (1, 0.0)], ids=["nodes may be added", "others use the nodes"]
)
def test_a_run_for_which_room_may_be_made_waits(refused: int, free: float) -> None:
    why = policy(3).why_hopeless(
        Outlook(says="", refused=refused),
        up_on=["a", "a"],
        coming=1,
        living=nodes(a=2 if refused == 0 else 4),
        free=nodes(a=free),
    )
    assert why is None


def test_why_workers_are_late_names_what_is_missing_or_set_up() -> None:
    placement = policy(2, start_timeout_s=5)
    assert placement.why_late(NOTHING_ADDED, Starting(), nodes(a=1, b=0), up=1) == (
        "the workers could not be placed within 5 s: 2 workers of 1 CPU each, 1 of them ready; the "
        "cluster has 1 CPU free on 2 nodes; no autoscaler adds nodes to it. Wait for other jobs, "
        "ask for fewer workers, or raise ScalingConfig(start_timeout_s=…)"
    )
    sets_up = Starting(hosts=("10.77.0.3",), setup="pip packages")
    late = placement.why_late(None, sets_up, {}, up=1)
    assert "Ray has not set up pip packages within 5 s" in late
    late = placement.why_late(None, Starting(hosts=("10.77.0.3",)), {}, up=1)
    assert "on 10.77.0.3" in late
    assert "reserved" in late
    assert "start_timeout_s" in late


def test_what_is_awaited_is_resources_only_if_they_are_missing() -> None:
    placement = policy(3, start_timeout_s=60)
    free = nodes(a=15)
    starting = Starting(hosts=("10.77.0.3",))
    assert placement.awaited(NOTHING_ADDED, starting, free, up=2) == (
        "Waiting for workers, up to 60 s: Ray is starting processes on 10.77.0.3 (reserved)."
    )
    both = placement.awaited(NOTHING_ADDED, starting, free, up=1)
    assert both.startswith(
        "Waiting for resources, up to 60 s: 3 workers of 1 CPU each, 1 of them ready; the cluster "
    )
    assert "Ray is starting processes on 10.77.0.3 (reserved)" in both
    assert "reserved" not in placement.awaited(NOTHING_ADDED, Starting(), free, up=1)


def test_a_run_of_a_fixed_size_says_on_which_lost_node_its_room_still_is() -> None:
    lost = ["10.77.0.2"]
    said = policy(2).awaited(NOTHING_ADDED, Starting(), nodes(a=0), up=1, lost=lost)
    assert "Room is still reserved on 10.77.0.2, lost: Ray looks for other room" in said
    elastic = policy((2, 3)).awaited(NOTHING_ADDED, Starting(), nodes(a=0), up=1, lost=lost)
    assert "10.77.0.2" not in elastic


@given(
    lost=st.integers(0, 4),
    alive=st.integers(0, 4),
    room=st.integers(0, 12),
    has_devices=st.booleans(),
)
def test_bundles_of_a_lost_node_move_all_together_or_where_there_is_room_twice(
    lost: int, alive: int, room: int, *, has_devices: bool
) -> None:
    count = lost + alive
    if not count:
        return
    device = {"device": 1.0} if has_devices else {}
    placement = policy(count, resources_per_worker={"CPU": 1, **device})
    where = {bundle: "b" if bundle < lost else "a" for bundle in range(count)}
    free = {"c": {"CPU": float(room), "device": 99.0}}
    moved = placement.bundles_to_move(
        set(range(lost, count)), where, lost={"b"}, avoided=(), free=free
    )
    is_cheap = not has_devices and room >= 2 * lost
    assert moved == (list(range(lost)) if alive == 0 or is_cheap else [])
