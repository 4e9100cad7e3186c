"""Which agents work for a run: who gets a rank, who stands by, who is waited for."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

import pytest
from tests.core.fake_cluster import FakeCluster

from polytrain.errors import FailureKind
from polytrain.events.attempt import AgentsPlaced, DrainWanted, PlacementFailed, Purpose
from polytrain.policy.autoscaling import Outlook
from polytrain.policy.links import FailedLink
from polytrain.workers.driver.worker_pool import WorkerPool

NOBODY: dict[str, float] = {}
NO_RANK = frozenset[int]()


def begin(pool: WorkerPool, cluster: FakeCluster) -> None:
    """Place the first attempt."""
    pool.place(avoid=NOBODY, without=NO_RANK)
    cluster.settle(pool)


def nodes(pool: WorkerPool) -> list[str]:
    return [agent_handle.place.node_id for agent_handle in pool.agents.ranked]


def test_ranks_are_numbered_node_by_node_from_the_drivers_on() -> None:
    cluster = FakeCluster(b=2, a=2)
    pool = cluster.pool(4)
    begin(pool, cluster)
    assert cluster.events == [AgentsPlaced(nodes=("a", "a", "b", "b"))]
    assert nodes(pool) == ["a", "a", "b", "b"]
    assert cluster.waiting == {}


def test_a_fixed_number_is_waited_for() -> None:
    cluster = FakeCluster(a=2)
    pool = cluster.pool(3)
    begin(pool, cluster)
    assert cluster.events == []
    cluster.nodes["b"] = 1
    cluster.settle(pool)
    assert cluster.sizes() == [3]


def test_an_elastic_run_begins_with_those_that_there_is_room_for() -> None:
    cluster = FakeCluster(a=2, b=1)
    pool = cluster.pool((1, 8))
    begin(pool, cluster)
    assert cluster.sizes() == [3]
    # The others are waited for all the time, by nobody's looking.
    assert len(cluster.waiting) == 5


def test_what_is_left_over_on_nodes_is_no_room() -> None:
    """Half a worker on each of two nodes: nobody waits for it to arrive."""
    cluster = FakeCluster(a=3, b=3)
    pool = cluster.pool((1, 8), resources_per_worker={"CPU": 2})
    pool.place(avoid=NOBODY, without=NO_RANK)
    assert len(cluster.waiting) == 8
    arriving = list(cluster.waiting)[:2]
    for agent_handle, node in zip(arriving, "ab", strict=True):
        assert cluster.sizes() == []
        cluster.arrive(pool, agent_handle, node)
    assert cluster.sizes() == [2]


def test_a_run_grows_to_all_that_came_at_its_next_checkpoint() -> None:
    cluster = FakeCluster(a=2)
    pool = cluster.pool((1, 4))
    begin(pool, cluster)
    cluster.nodes["b"] = 2
    cluster.settle(pool)
    drains = [event for event in cluster.events if isinstance(event, DrainWanted)]
    assert {drain.purpose for drain in drains} == {Purpose.RESIZE}
    assert "4 workers" in drains[-1].reason
    # It is the same run until then.
    assert nodes(pool) == ["a", "a"]
    pool.place(avoid=NOBODY, without=NO_RANK)
    assert cluster.sizes() == [2, 4]
    assert nodes(pool) == ["a", "a", "b", "b"]


def test_an_elastic_run_that_lost_all_takes_those_that_come_together() -> None:
    cluster = FakeCluster(a=3)
    pool = cluster.pool((1, 8))
    begin(pool, cluster)
    cluster.lose_node(pool, "a")
    cluster.nodes["b"] = 3
    pool.place(avoid=NOBODY, without=NO_RANK)
    cluster.settle(pool)
    assert cluster.sizes() == [3, 3]


def test_an_elastic_run_waits_for_others_no_longer_than_they_take_together() -> None:
    cluster = FakeCluster(a=3)
    pool = cluster.pool((1, 8))
    begin(pool, cluster)
    cluster.lose_node(pool, "a")
    pool.place(avoid=NOBODY, without=NO_RANK)
    cluster.now = 5.0
    cluster.nodes["b"] = 2
    cluster.settle(pool)
    assert cluster.sizes() == [3]
    assert pool.deadline == 5.5
    cluster.now = 5.5
    pool.look_at_the_clock()
    assert cluster.sizes() == [3, 2]


def test_an_elastic_run_with_enough_agents_waits_for_nobody() -> None:
    cluster = FakeCluster(a=1, b=2)
    pool = cluster.pool((1, 8))
    begin(pool, cluster)
    cluster.lose_node(pool, "b")
    pool.place(avoid=NOBODY, without=NO_RANK)
    assert cluster.sizes() == [3, 1]


def test_a_run_of_its_greatest_size_has_nothing_to_gain() -> None:
    cluster = FakeCluster(a=8)
    pool = cluster.pool((1, 4), standby=1)
    begin(pool, cluster)
    assert cluster.sizes() == [4]
    assert cluster.growths() == []
    assert len(cluster.placed) == 5


def test_standbys_are_not_used_to_grow() -> None:
    cluster = FakeCluster(a=2)
    pool = cluster.pool((1, 4), standby=1)
    begin(pool, cluster)
    cluster.nodes["b"] = 1
    cluster.settle(pool)
    assert cluster.growths() == []
    cluster.nodes["b"] = 2
    cluster.settle(pool)
    assert len(cluster.growths()) == 1
    assert "3 workers" in cluster.growths()[0]


def test_a_loss_makes_an_elastic_run_smaller_at_once() -> None:
    cluster = FakeCluster(a=2, b=2)
    pool = cluster.pool((1, 4))
    begin(pool, cluster)
    lost = cluster.lose_node(pool, "b")
    assert [(event.rank, event.kind) for event in lost] == [
        (2, FailureKind.NODE_LOST),
        (3, FailureKind.NODE_LOST),
    ]
    pool.place(avoid=NOBODY, without=NO_RANK)
    assert cluster.sizes() == [4, 2]
    cluster.nodes["c"] = 2
    cluster.settle(pool)
    pool.place(avoid=NOBODY, without=NO_RANK)
    assert cluster.sizes() == [4, 2, 4]


def test_fewer_than_the_least_are_no_run() -> None:
    cluster = FakeCluster(a=1, b=2)
    pool = cluster.pool((2, 4))
    begin(pool, cluster)
    cluster.lose_node(pool, "b")
    pool.place(avoid=NOBODY, without=NO_RANK)
    assert cluster.sizes() == [3]
    cluster.nodes["c"] = 1
    cluster.settle(pool)
    cluster.now = 0.5
    pool.look_at_the_clock()
    assert cluster.sizes() == [3, 2]


@pytest.mark.parametrize("num_workers", [3, (1, 3)])
def test_a_standby_takes_the_lost_rank_and_nobody_elses(num_workers: int | tuple[int, int]) -> None:
    cluster = FakeCluster(a=3, b=1)
    pool = cluster.pool(num_workers, standby=1)
    begin(pool, cluster)
    if num_workers != 3:
        # An elastic run begins with all that it finds: its standby comes later.
        cluster.nodes["b"] = 2
        cluster.settle(pool)
    [spare] = set(cluster.placed) - set(pool.agents.ranked)
    before = list(pool.agents.ranked)
    lost = cluster.lose(pool, before[1])
    assert lost is not None
    assert lost.rank == 1
    pool.place(avoid=NOBODY, without=NO_RANK)
    assert cluster.sizes() == [3, 3]
    assert pool.agents.ranked == [before[0], spare, before[2]]
    # Another one takes the standby's place.
    cluster.settle(pool)
    assert len(cluster.placed) == 4


def test_a_standby_is_on_a_node_without_workers_if_there_is_one() -> None:
    cluster = FakeCluster(a=4, b=1)
    pool = cluster.pool(2, standby=1)
    begin(pool, cluster)
    [spare] = set(cluster.placed) - set(pool.agents.ranked)
    assert spare.place.node_id == "b"


def test_a_standby_is_beside_the_workers_if_nobody_else_has_room() -> None:
    cluster = FakeCluster(a=4)
    pool = cluster.pool(2, standby=1)
    begin(pool, cluster)
    assert len(cluster.placed) == 3


@pytest.mark.parametrize("kind", [FailureKind.NODE_LOST, FailureKind.PREEMPTED])
def test_a_standby_goes_with_its_node_though_only_a_rank_there_is_reported(
    kind: FailureKind,
) -> None:
    """Each of the node's agents is reported by itself, some after the next launch."""
    cluster = FakeCluster(a=1, b=2)
    pool = cluster.pool(2, standby=1)
    begin(pool, cluster)
    [standby] = set(cluster.placed) - set(pool.agents.ranked)
    assert nodes(pool) == ["a", "b"]
    assert standby.place.node_id == "b"
    lost = cluster.lose(pool, pool.agents.ranked[1], kind)
    assert lost is not None
    pool.place(avoid=NOBODY, without=NO_RANK)
    assert cluster.sizes() == [2]
    assert standby in cluster.dismissed
    # What is reported of it afterwards is the same loss.
    assert cluster.lose(pool, standby, kind) is None
    del cluster.nodes["b"]
    cluster.nodes["c"] = 2
    cluster.settle(pool)
    assert cluster.sizes() == [2, 2]
    assert nodes(pool) == ["a", "c"]


def test_a_rank_of_a_lost_node_that_has_exited_is_not_launched_there_again() -> None:
    """As with GPUs, where each agent has its own actor, and is reported by itself."""
    cluster = FakeCluster(a=1, b=2)
    pool = cluster.pool((1, 3))
    begin(pool, cluster)
    one, other = pool.agents.ranked[1:]
    cluster.lose(pool, one, FailureKind.NODE_LOST)
    pool.place(avoid=NOBODY, without=NO_RANK)
    assert nodes(pool) == ["a"]
    assert cluster.lose(pool, other, FailureKind.NODE_LOST) is None


def test_each_rank_of_a_lost_node_is_reported_to_the_attempt_that_waits_for_its_end() -> None:
    cluster = FakeCluster(a=1, b=2)
    pool = cluster.pool(3)
    begin(pool, cluster)
    lost = cluster.lose_node(pool, "b")
    assert [event.rank for event in lost] == [1, 2]


def test_an_agent_that_dies_alone_takes_no_other_of_its_node_with_it() -> None:
    cluster = FakeCluster(a=3)
    pool = cluster.pool(2, standby=1)
    begin(pool, cluster)
    [standby] = set(cluster.placed) - set(pool.agents.ranked)
    cluster.lose(pool, pool.agents.ranked[1], FailureKind.AGENT_LOST)
    pool.place(avoid=NOBODY, without=NO_RANK)
    assert standby in pool.agents.ranked


def test_a_node_that_comes_back_is_used_again() -> None:
    """It was unreachable for a moment only."""
    cluster = FakeCluster(a=1, b=1)
    pool = cluster.pool((1, 2))
    begin(pool, cluster)
    cluster.lose(pool, pool.agents.ranked[1], FailureKind.NODE_LOST)
    pool.place(avoid=NOBODY, without=NO_RANK)
    [requested] = cluster.waiting
    cluster.arrive(pool, requested, "b")
    assert len(cluster.growths()) == 1
    pool.place(avoid=NOBODY, without=NO_RANK)
    assert cluster.sizes() == [2, 1, 2]


@pytest.mark.parametrize("may_return", [True, False])
def test_a_request_leaves_a_silent_node_to_the_launcher_which_knows_when_it_is_back(
    may_return: bool,
) -> None:
    """What a request excludes it excludes for good."""
    cluster = FakeCluster(a=1, b=1)
    pool = cluster.pool((1, 2))
    begin(pool, cluster)
    lost = pool.agents.ranked[1]
    cluster.lose(pool, lost, FailureKind.NODE_LOST, node_may_return=may_return)
    pool.place(avoid=NOBODY, without=NO_RANK)
    [avoided] = cluster.waiting.values()
    assert avoided == (frozenset() if may_return else {lost.place.node_id})


@pytest.mark.parametrize("returns", ["b", "c"])
def test_a_run_all_of_whose_nodes_were_silent_takes_the_first_that_answers(returns: str) -> None:
    """As when the driver's own host was cut off, with the standby on it."""
    cluster = FakeCluster(b=1, c=1, d=1)
    pool = cluster.pool(2, standby=1)
    begin(pool, cluster)
    assert nodes(pool) == ["b", "c"]
    cluster.silence(pool, "b", node_may_return=True)
    cluster.silence(pool, "c", node_may_return=True)
    pool.place(avoid=NOBODY, without=NO_RANK)
    cluster.settle(pool)
    assert cluster.sizes() == [2]
    cluster.answer(pool, returns)
    assert cluster.sizes() == [2, 2]
    assert sorted(nodes(pool)) == sorted([returns, "d"])


def test_a_run_takes_a_node_that_answers_again_though_it_waits_for_a_standby() -> None:
    """The standby is to be where a dead node was, for which there is no other room."""
    cluster = FakeCluster(b=1, c=1, d=1)
    pool = cluster.pool(2, standby=1)
    begin(pool, cluster)
    cluster.lose_node(pool, "c")
    pool.place(avoid=NOBODY, without=NO_RANK)
    assert nodes(pool) == ["b", "d"]
    cluster.silence(pool, "b", node_may_return=True)
    pool.place(avoid=NOBODY, without=NO_RANK)
    cluster.settle(pool)
    assert cluster.sizes() == [2, 2]
    cluster.answer(pool, "b")
    assert cluster.sizes() == [2, 2, 2]
    assert nodes(pool) == ["b", "d"]


@pytest.mark.parametrize("avoids", ["the one that is back", "none"])
def test_a_run_takes_a_node_that_is_back_instead_of_waiting_for_one_that_is_lost(
    avoids: str,
) -> None:
    """Its own room is reserved on both, and the first is the one of the lost node."""
    cluster = FakeCluster(a=1, b=1, c=1)
    pool = cluster.pool(2, standby=1)
    begin(pool, cluster)

    def lose(name: str, avoid: dict[str, float] = NOBODY) -> None:
        cluster.silence(pool, name, node_may_return=True)
        pool.place(avoid=avoid, without=NO_RANK)
        cluster.settle(pool)

    for name in ("b", "c"):
        lose(name)
        cluster.answer(pool, name)
    back = {"b": math.inf}
    lose("b", avoid=back)
    cluster.answer(pool, "b")
    assert cluster.sizes() == [2, 2, 2, 2]
    assert nodes(pool) == ["a", "c"]
    lose("a", avoid=NOBODY if avoids == "none" else back)
    for _ in range(2):
        cluster.now += 10
        pool.look_at_the_clock()
        cluster.settle(pool)
    assert cluster.sizes() == [2, 2, 2, 2, 2]
    assert nodes(pool) == ["b", "c"]


def test_a_driver_whose_host_is_given_up_does_not_wait_for_agents() -> None:
    """It was cut off for too long: the cluster has ended its job, and gives it nothing."""
    cluster = FakeCluster(a=1, b=1, c=1)
    pool = cluster.pool(2)
    begin(pool, cluster)
    for name in ("b", "c"):
        cluster.silence(pool, name, node_may_return=True)
    pool.place(avoid=NOBODY, without=NO_RANK)
    cluster.now += 10
    pool.look_at_the_clock()
    assert cluster.failures() == []
    del cluster.nodes["a"]
    cluster.now += 10
    pool.look_at_the_clock()
    [failure] = cluster.failures()
    assert "given up the host of this driver" in failure
    assert "Start the script again" in failure


def test_the_loss_of_a_standby_is_no_failure_and_is_made_good() -> None:
    cluster = FakeCluster(a=3)
    pool = cluster.pool(2, standby=1)
    begin(pool, cluster)
    [spare] = set(cluster.placed) - set(pool.agents.ranked)
    assert cluster.lose(pool, spare) is None
    cluster.settle(pool)
    assert len(cluster.placed) == 3
    assert cluster.sizes() == [2]


def test_who_is_lost_while_others_are_placed_is_asked_for_again() -> None:
    cluster = FakeCluster(a=3)
    pool = cluster.pool(3)
    pool.place(avoid=NOBODY, without=NO_RANK)
    assert cluster.lose(pool, next(iter(cluster.waiting))) is None
    cluster.settle(pool)
    assert cluster.sizes() == [3]
    assert len(cluster.placed) == 3


def test_agents_of_before_may_be_lost_all_at_once_while_others_are_placed() -> None:
    """A node takes many with it; that says nothing about those that are asked for."""
    cluster = FakeCluster(a=1, b=9)
    pool = cluster.pool(10)
    begin(pool, cluster)
    cluster.lose(pool, pool.agents.ranked[0])
    cluster.nodes["a"] = 0
    pool.place(avoid=NOBODY, without=NO_RANK)
    assert cluster.lose_node(pool, "b") == []
    assert cluster.failures() == []


@pytest.mark.parametrize("num_workers", [1, 2, 12])
def test_agents_that_never_come_end_the_run(num_workers: int) -> None:
    cluster = FakeCluster(a=12)
    pool = cluster.pool(num_workers)
    pool.place(avoid=NOBODY, without=NO_RANK)
    asked = 0
    while not cluster.failures():
        asked += 1
        cluster.lose(pool, next(iter(cluster.waiting)))
    [failure] = cluster.failures()
    assert failure.startswith(f"{asked} agents in a row were lost")
    assert failure.endswith("the last: it has died")
    assert asked <= num_workers + 4


@pytest.mark.parametrize("is_begun", [False, True])
def test_an_elastic_run_goes_without_a_node_on_which_agents_die(
    is_begun: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It may lack a package. Others that come later are used."""
    cluster = FakeCluster(a=1, b=1)
    pool = cluster.pool((1, 3))
    pool.place(avoid=NOBODY, without=NO_RANK)
    if is_begun:
        cluster.nodes["b"] = 0
        cluster.settle(pool)
        cluster.nodes["b"] = 1
    else:
        cluster.arrive(pool, next(iter(cluster.waiting)), "a")
    for _ in range(4):
        cluster.lose(pool, next(iter(cluster.waiting)), node="b")
    assert (cluster.sizes(), cluster.failures()) == ([1], [])
    assert "placed on a node: 4 agents in a row were lost" in caplog.text
    cluster.settle(pool)
    assert nodes(pool) == ["a"]
    cluster.nodes["c"] = 1
    cluster.settle(pool)
    assert len(cluster.growths()) == 1


def test_a_node_on_which_agents_die_gets_no_more_while_nodes_connect() -> None:
    cluster = FakeCluster(a=1, b=1, c=1)
    pool = cluster.pool((2, 3), tries_links=True)
    pool.place(avoid=NOBODY, without=NO_RANK)
    for node in ("a", "b"):
        cluster.arrive(pool, next(iter(cluster.waiting)), node)
    cluster.now += 10
    cluster.starts_on = ("c",)
    pool.look_at_the_clock()
    for _ in range(4):
        cluster.lose(pool, next(iter(cluster.waiting)), node="c")
    assert cluster.links_tried_of == [["a", "b"]]
    cluster.now, cluster.starts_on = cluster.now + 10, ()
    pool.look_at_the_clock()
    assert all("c" in avoid for avoid in cluster.waiting.values())
    pool.links_tried([])
    assert nodes(pool) == ["a", "b"]


def test_an_elastic_run_begins_elsewhere_if_agents_die_before_others_arrive() -> None:
    """A broken node fails in a second, and others import for longer."""
    cluster = FakeCluster(a=1, b=1)
    pool = cluster.pool((1, 3))
    pool.place(avoid=NOBODY, without=NO_RANK)
    [good, *_] = cluster.waiting
    for _ in range(4):
        cluster.lose(pool, next(each for each in cluster.waiting if each is not good), node="b")
    cluster.arrive(pool, good, "a")
    while cluster.now < 60 and not cluster.sizes():
        cluster.now += 10
        pool.look_at_the_clock()
    assert (cluster.sizes(), cluster.failures()) == ([1], [])


@pytest.mark.parametrize(("least", "other"), [(1, 0), (2, 1)])
def test_an_elastic_run_ends_if_agents_die_where_alone_it_has_room(least: int, other: int) -> None:
    """The other is a head without CPUs, say, or too small."""
    cluster = FakeCluster(head=other, b=4)
    pool = cluster.pool((least, 3))
    pool.place(avoid=NOBODY, without=NO_RANK)
    for _ in range(4):
        cluster.lose(pool, next(iter(cluster.waiting)), node="b")
    [failure] = cluster.failures()
    assert failure.startswith("4 agents in a row were lost")


def test_who_waits_in_vain_for_other_nodes_is_told_why_one_is_avoided() -> None:
    cluster = FakeCluster(a=1, b=1)
    cluster.others["a"] = 1
    pool = cluster.pool((1, 3))
    pool.place(avoid=NOBODY, without=NO_RANK)
    for _ in range(4):
        cluster.lose(pool, next(iter(cluster.waiting)), node="b")
    while cluster.now < 700 and not cluster.failures():
        cluster.now += 10
        pool.look_at_the_clock()
    [failure] = cluster.failures()
    assert failure.startswith("the workers could not be placed within 600 s: ")
    assert ". Besides, 4 agents in a row were lost" in failure


def test_an_elastic_run_ends_if_agents_die_on_all_nodes() -> None:
    cluster = FakeCluster(a=1, b=1)
    pool = cluster.pool((1, 3))
    pool.place(avoid=NOBODY, without=NO_RANK)
    for node in "b" * 4 + "a" * 4:
        cluster.lose(pool, next(iter(cluster.waiting)), node=node)
    [failure] = cluster.failures()
    assert failure.startswith("4 agents in a row were lost")


def test_an_elastic_run_with_devices_begins_without_agents_that_die(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Ray doesn't say on which node they have died."""
    cluster = FakeCluster(a=1, b=1)
    pool = cluster.pool((1, 2))
    pool.place(avoid=NOBODY, without=NO_RANK)
    cluster.arrive(pool, next(iter(cluster.waiting)), "a")
    while cluster.waiting:
        cluster.lose(pool, next(iter(cluster.waiting)))
    assert (cluster.sizes(), cluster.failures()) == ([1], [])
    assert "No more workers are requested: 4 agents in a row were lost" in caplog.text


def test_a_node_that_does_not_see_the_storage_ends_the_run_before_it_begins() -> None:
    cluster = FakeCluster(a=1, b=1)
    pool = cluster.pool(2)
    pool.place(avoid=NOBODY, without=NO_RANK)
    first, second = list(cluster.waiting)
    cluster.arrive(pool, first, "a")
    cluster.arrive(pool, second, "b", unusable="b doesn't see it")
    assert cluster.events == [PlacementFailed(reason="b doesn't see it")]


def test_a_running_run_does_not_grow_onto_a_node_that_does_not_see_the_storage(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster = FakeCluster(a=1)
    pool = cluster.pool((1, 2))
    begin(pool, cluster)
    [waiting] = cluster.waiting
    cluster.arrive(pool, waiting, "b", unusable="b doesn't see it")
    assert cluster.sizes() == [1]
    assert "b doesn't see it" in caplog.text
    assert list(cluster.waiting.values()) == [frozenset("b")]


@pytest.mark.parametrize("avoid", [NOBODY, {"a": math.inf}], ids=["", "all other nodes left"])
def test_a_node_that_was_rejected_is_not_tried_again(avoid: dict[str, float]) -> None:
    """A node may still be added: the run waits for it as long as for any other."""
    cluster = FakeCluster(a=2)
    pool = cluster.pool((2, 3))
    begin(pool, cluster)
    cluster.nodes["b"] = 1
    [waiting] = cluster.waiting
    cluster.arrive(pool, waiting, "b", unusable="b doesn't see it")
    cluster.lose(pool, pool.agents.ranked[1])
    cluster.others["a"] = 1
    pool.place(avoid=avoid, without=NO_RANK)
    for cluster.now in (10.0, 20.0):
        assert set(cluster.waiting.values()) == {frozenset("b")}
        pool.look_at_the_clock()
    cluster.arrive(pool, next(iter(cluster.waiting)), "b", unusable="b doesn't see it")
    assert cluster.failures() == []
    cluster.now = 1e9
    pool.look_at_the_clock()
    [failure] = cluster.failures()
    assert failure.endswith("(start_timeout_s=…). Besides, b doesn't see it")


def test_a_run_with_enough_agents_does_not_end_by_a_node_that_it_can_not_use() -> None:
    cluster = FakeCluster(a=3)
    pool = cluster.pool((1, 3))
    begin(pool, cluster)
    cluster.lose(pool, pool.agents.ranked[2])
    pool.place(avoid=NOBODY, without=NO_RANK)
    late = next(iter(cluster.waiting))
    for rank in (0, 1):
        cluster.lose(pool, pool.agents.ranked[rank])
    pool.place(avoid=NOBODY, without=NO_RANK)
    first, second, third = [late, *(each for each in cluster.waiting if each is not late)]
    cluster.arrive(pool, first, "a")
    cluster.arrive(pool, second, "b", unusable="b doesn't see it")
    assert cluster.failures() == []
    cluster.arrive(pool, third, "a")
    cluster.now += 1
    pool.look_at_the_clock()
    assert cluster.sizes()[-1] == 2


def test_a_node_with_other_versions_is_named_once_before_the_start(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster = FakeCluster(a=1, b=2)
    pool = cluster.pool(3)
    pool.place(avoid=NOBODY, without=NO_RANK)
    for agent_handle, node in zip(list(cluster.waiting), "abb", strict=True):
        assert caplog.text == ""
        other = ("torch 2.0.1 (driver: 2.13.0)",) if node == "b" else ()
        cluster.arrive(pool, agent_handle, node, other_versions=other)
    assert cluster.sizes() == [3]
    assert caplog.text.count("Other versions on b: torch 2.0.1 (driver: 2.13.0).") == 1
    caplog.clear()
    pool.place(avoid=NOBODY, without=NO_RANK)
    assert (cluster.sizes(), caplog.text) == ([3, 3], "")


def test_standbys_that_never_come_are_not_asked_for_for_ever() -> None:
    cluster = FakeCluster(a=3)
    pool = cluster.pool(2, standby=1)
    pool.place(avoid=NOBODY, without=NO_RANK)
    while cluster.sizes() == []:
        agent_handle = next(iter(cluster.waiting))
        cluster.arrive(pool, agent_handle, "a")
    asked = 0
    while cluster.waiting:
        asked += 1
        cluster.lose(pool, next(iter(cluster.waiting)))
    assert asked <= 5
    assert cluster.failures() == []
    # A worker that is lost later is another matter.
    cluster.lose(pool, pool.agents.ranked[0])
    pool.place(avoid=NOBODY, without=NO_RANK)
    cluster.settle(pool)
    assert cluster.sizes() == [2, 2]


def test_workers_leave_the_nodes_that_they_should() -> None:
    cluster = FakeCluster(a=2, b=2)
    pool = cluster.pool(2)
    begin(pool, cluster)
    before = list(pool.agents.ranked)
    pool.place(avoid={"a": math.inf}, without=NO_RANK)
    assert set(cluster.dismissed) == set(before)
    cluster.settle(pool)
    assert nodes(pool) == ["b", "b"]
    # They were sent away: that they are gone is nobody's loss.
    assert [cluster.lose(pool, agent_handle) for agent_handle in before] == [None, None]
    assert cluster.sizes() == [2, 2]


def test_workers_stay_where_they_are_if_no_other_node_holds_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster = FakeCluster(a=2, b=1)
    pool = cluster.pool(2)
    begin(pool, cluster)
    before = list(pool.agents.ranked)
    with caplog.at_level(logging.WARNING):
        pool.place(avoid={"a": math.inf}, without=NO_RANK)
    assert cluster.sizes() == [2, 2]
    assert pool.agents.ranked == before
    assert "no others can hold the workers" in caplog.text


def test_the_room_of_a_node_that_went_as_it_had_said_is_used_where_it_is_held_now() -> None:
    """Two workers on nodes of their own, and exactly as much room as they need."""
    cluster = FakeCluster(a=1, b=1)
    pool = cluster.pool(2)
    begin(pool, cluster)
    cluster.lose_node(pool, "b")
    cluster.nodes["c"] = 1
    pool.place(avoid={"b": math.inf}, without=NO_RANK)
    cluster.settle(pool)
    assert cluster.sizes() == [2, 2]
    assert nodes(pool) == ["a", "c"]


def test_a_fixed_run_does_not_wait_for_the_cluster_to_notice_that_a_node_is_lost() -> None:
    cluster = FakeCluster(a=1, b=2, c=4)
    pool = cluster.pool(3)
    begin(pool, cluster)
    assert nodes(pool) == ["a", "b", "b"]
    cluster.silence(pool, "b")
    pool.place(avoid=NOBODY, without=NO_RANK)
    cluster.settle(pool)
    assert cluster.sizes() == [3, 3]
    assert nodes(pool) == ["a", "c", "c"]


def test_room_moves_from_a_lost_node_though_a_standby_is_waited_for() -> None:
    """The standby may be on no node with room."""
    cluster = FakeCluster(a=1, b=1, c=1)
    cluster.silent.add("c")
    pool = cluster.pool(2, standby=1)
    begin(pool, cluster)
    assert list(cluster.waiting.values()) == [{"a", "b"}]
    cluster.silence(pool, "b")
    cluster.nodes["a"] = 3
    pool.place(avoid=NOBODY, without=NO_RANK)
    cluster.settle(pool)
    assert cluster.sizes() == [2, 2]
    assert nodes(pool) == ["a", "a"]


def test_room_moves_from_a_lost_node_on_which_an_agent_is_waited_for() -> None:
    """Its agent had died alone before, and the next wasn't there yet."""
    cluster = FakeCluster(a=1, b=2, c=4)
    pool = cluster.pool(3)
    begin(pool, cluster)
    [_, first, _] = pool.agents.ranked
    cluster.lose(pool, first)
    pool.place(avoid=NOBODY, without=NO_RANK)
    assert [each.bundle for each in cluster.waiting] == [first.bundle]
    cluster.silence(pool, "b")
    cluster.settle(pool)
    assert cluster.sizes() == [3, 3]
    assert nodes(pool) == ["a", "c", "c"]


def test_a_fixed_run_waits_for_the_cluster_if_there_is_room_only_once() -> None:
    """The cluster wants room for the lost bundles too, and would never find any."""
    cluster = FakeCluster(a=1, b=2, c=3)
    pool = cluster.pool(3)
    begin(pool, cluster)
    cluster.silence(pool, "b")
    pool.place(avoid=NOBODY, without=NO_RANK)
    cluster.settle(pool)
    assert cluster.sizes() == [3]
    del cluster.nodes["b"]
    cluster.settle(pool)
    assert nodes(pool) == ["a", "c", "c"]
    assert cluster.held() == ["a", "c", "c"]


def test_all_room_of_a_run_moves_together_and_the_old_is_freed() -> None:
    cluster = FakeCluster(b=2, c=2)
    pool = cluster.pool(2, placement_strategy="STRICT_PACK")
    begin(pool, cluster)
    cluster.silence(pool, "b")
    pool.place(avoid=NOBODY, without=NO_RANK)
    cluster.settle(pool)
    assert nodes(pool) == ["c", "c"]
    assert cluster.held() == ["c", "c"]


@pytest.mark.parametrize(
    ("strategy", "expected"), [("STRICT_SPREAD", "d"), ("SPREAD", "d"), ("PACK", "a")]
)
def test_a_moved_rank_is_where_its_placement_strategy_says(strategy: str, expected: str) -> None:
    cluster = FakeCluster(b=1)
    pool = cluster.pool(2, placement_strategy=strategy)
    pool.place(avoid=NOBODY, without=NO_RANK)
    cluster.nodes = {"a": 2, "b": 1, "d": 1}
    cluster.others = {"a": 1}
    cluster.settle(pool)
    assert nodes(pool) == ["a", "b"]
    cluster.others = {}
    cluster.silence(pool, "b")
    pool.place(avoid=NOBODY, without=NO_RANK)
    cluster.settle(pool)
    assert nodes(pool) == ["a", expected]


def test_a_node_is_shared_if_spreading_finds_no_other_and_is_not_strict() -> None:
    cluster = FakeCluster(a=1, b=1)
    pool = cluster.pool(2, placement_strategy="SPREAD")
    begin(pool, cluster)
    cluster.silence(pool, "b")
    cluster.nodes["a"] = 3
    pool.place(avoid=NOBODY, without=NO_RANK)
    cluster.settle(pool)
    assert nodes(pool) == ["a", "a"]


def test_room_that_comes_later_is_used_where_the_cluster_holds_it_by_then() -> None:
    """Once it has noticed, it wants it for the first reservation as well."""
    cluster = FakeCluster(a=1, b=1, c=2)
    pool = cluster.pool(2)
    begin(pool, cluster)
    cluster.silence(pool, "b")
    cluster.rivals = {"c": 2}
    pool.place(avoid=NOBODY, without=NO_RANK)
    cluster.settle(pool)
    assert cluster.sizes() == [2]
    del cluster.nodes["b"]
    cluster.others = {"c": 1}
    cluster.hold_room_of_the_lost_first()
    cluster.now = pool.deadline or 0.0
    assert cluster.now <= 1.0
    pool.look_at_the_clock()
    cluster.settle(pool)
    assert cluster.sizes() == [2, 2]
    assert nodes(pool) == ["a", "c"]
    assert cluster.held() == ["a", "c"]


def test_a_standby_that_is_to_be_replaced_does_not_move_any_room() -> None:
    """Nobody waits for it: two reservations would be held until the end of the run."""
    cluster = FakeCluster(a=1, b=1, c=1, d=1)
    pool = cluster.pool(2, standby=1)
    begin(pool, cluster)
    cluster.silence(pool, "b")
    pool.place(avoid=NOBODY, without=NO_RANK)
    cluster.settle(pool)
    assert nodes(pool) == ["a", "c"]
    assert cluster.held() == ["a", "b"]
    del cluster.nodes["b"]
    cluster.settle(pool)
    assert cluster.held() == ["a", "d"]
    assert len(cluster.placed) == 3


@pytest.mark.parametrize("num_workers", [2, (2, 3)])
def test_workers_return_if_the_nodes_that_seemed_to_have_room_have_none(
    num_workers: int | tuple[int, int],
) -> None:
    cluster = FakeCluster(a=2)
    pool = cluster.pool(num_workers)
    begin(pool, cluster)
    cluster.nodes["b"] = 2
    # Somebody else uses it.
    cluster.others["b"] = 2
    pool.place(avoid={"a": math.inf}, without=NO_RANK)
    cluster.settle(pool)
    assert cluster.sizes() == [2]
    cluster.now = 10.0
    pool.look_at_the_clock()
    cluster.settle(pool)
    assert cluster.sizes() == [2, 2]
    assert nodes(pool) == ["a", "a"]
    assert cluster.failures() == []


def test_an_elastic_run_leaves_a_node_if_its_least_number_finds_room_elsewhere() -> None:
    cluster = FakeCluster(a=2, b=1)
    pool = cluster.pool((1, 3))
    begin(pool, cluster)
    pool.place(avoid={"a": math.inf}, without=NO_RANK)
    assert cluster.sizes() == [3, 1]
    assert nodes(pool) == ["b"]
    cluster.settle(pool)
    assert cluster.growths() == []


@pytest.mark.parametrize(("num_workers", "standby"), [((1, 2), 0), (1, 1)])
def test_a_node_is_used_again_after_its_cool_down(
    num_workers: int | tuple[int, int], standby: int
) -> None:
    cluster = FakeCluster(a=1, b=1)
    pool = cluster.pool(num_workers, standby=standby)
    begin(pool, cluster)
    pool.place(avoid={"b": 600.0}, without=NO_RANK)
    assert len(pool.agents.here) == 1
    for now, there in ((599.0, 1), (600.0, 2)):
        assert pool.deadline == 600.0
        cluster.now = now
        pool.look_at_the_clock()
        cluster.settle(pool)
        assert len(pool.agents.here) == there
    assert len(cluster.growths()) == 1 - standby
    assert pool.deadline is None


def test_who_arrives_late_on_a_node_to_be_left_is_sent_on() -> None:
    cluster = FakeCluster(a=1, b=1)
    pool = cluster.pool((1, 3))
    begin(pool, cluster)
    late = next(iter(cluster.waiting))
    cluster.nodes.update(a=3, b=3)
    pool.place(avoid={"a": math.inf}, without=NO_RANK)
    cluster.arrive(pool, late, "a")
    cluster.settle(pool)
    assert late in cluster.dismissed
    pool.place(avoid={"a": math.inf}, without=NO_RANK)
    assert nodes(pool) == ["b", "b", "b"]


def test_a_rank_that_is_to_be_replaced_is_if_somebody_stands_by() -> None:
    cluster = FakeCluster(a=3)
    pool = cluster.pool(2, standby=1)
    begin(pool, cluster)
    [spare] = set(cluster.placed) - set(pool.agents.ranked)
    first, second = pool.agents.ranked
    pool.place(avoid=NOBODY, without=frozenset({0, 1}))
    assert pool.agents.ranked == [spare, second]
    assert cluster.dismissed == [first]


def test_a_rank_that_nobody_can_replace_stays() -> None:
    cluster = FakeCluster(a=2)
    pool = cluster.pool(2)
    begin(pool, cluster)
    before = list(pool.agents.ranked)
    pool.place(avoid=NOBODY, without=frozenset({0}))
    assert pool.agents.ranked == before
    assert cluster.dismissed == []


def test_it_is_reported_who_is_waited_for_and_in_the_end_given_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster = FakeCluster(a=1)
    pool = cluster.pool(2, start_timeout_s=60.0)
    begin(pool, cluster)
    assert pool.deadline == 10.0
    cluster.now = 9.9
    pool.look_at_the_clock()
    assert caplog.text == ""
    cluster.now = 10.0
    pool.look_at_the_clock()
    assert "2 workers of 1 CPU each; the cluster has 1 CPU free" in caplog.text
    # Whether the driver's own node is still there is looked at again.
    assert pool.deadline == 20.0
    caplog.clear()
    cluster.now = 59.9
    pool.look_at_the_clock()
    assert (caplog.text, cluster.events) == ("", [])
    cluster.now = 60.0
    pool.look_at_the_clock()
    [reason] = cluster.failures()
    assert "could not be placed within 60 s" in reason
    assert "start_timeout_s" in reason
    assert pool.deadline is None
    cluster.now = 1000.0
    pool.look_at_the_clock()
    assert len(cluster.events) == 1


def test_an_elastic_run_begins_with_less_than_there_seemed_to_be_room_for_after_a_while() -> None:
    """Others have taken it meanwhile."""
    cluster = FakeCluster(a=4)
    pool = cluster.pool((1, 4))
    pool.place(avoid=NOBODY, without=NO_RANK)
    cluster.nodes["a"] = 2
    cluster.settle(pool)
    assert cluster.sizes() == []
    cluster.now = 10.0
    pool.look_at_the_clock()
    assert cluster.sizes() == [2]


def test_a_crew_that_is_complete_waits_for_nothing() -> None:
    cluster = FakeCluster(a=2)
    pool = cluster.pool(2)
    begin(pool, cluster)
    assert pool.deadline is None
    cluster.now = 1e6
    pool.look_at_the_clock()
    assert cluster.sizes() == [2]


def test_a_slow_setup_is_reported_instead_of_missing_resources(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster = FakeCluster(a=1)
    cluster.sets_up = "RunConfig.worker_runtime_env ('pip')"
    cluster.starts_on = ("b", "b")
    pool = cluster.pool(2, start_timeout_s=60.0)
    begin(pool, cluster)
    cluster.now = 10.0
    pool.look_at_the_clock()
    sentence = "Waiting for workers, up to 60 s: Ray sets up RunConfig.worker_runtime_env ('pip')."
    assert sentence in caplog.text
    assert "free" not in caplog.text
    cluster.now = 60.0
    pool.look_at_the_clock()
    [reason] = cluster.failures()
    assert "Ray has not set up RunConfig.worker_runtime_env ('pip') within 60 s" in reason
    assert "start_timeout_s" in reason


def test_processes_that_start_slowly_lack_no_resources(caplog: pytest.LogCaptureFixture) -> None:
    cluster = FakeCluster(a=16, b=8)
    pool = cluster.pool(3, start_timeout_s=60.0)
    pool.place(avoid=NOBODY, without=NO_RANK)
    cluster.starts_on = ("10.77.0.3",) * 3
    cluster.now = 10.0
    pool.look_at_the_clock()
    assert "Ray is starting processes on 10.77.0.3 (reserved)" in caplog.text
    assert "Waiting for resources" not in caplog.text
    cluster.now = 60.0
    for _ in range(2):
        pool.look_at_the_clock()
    [reason] = cluster.failures()
    assert "has not started the processes of 3 workers within 60 s, on 10.77.0.3" in reason


def test_the_resources_of_a_lost_node_are_not_free(caplog: pytest.LogCaptureFixture) -> None:
    """The cluster takes it for alive, and all that its agents have left for free."""
    cluster = FakeCluster(a=1, b=15)
    pool = cluster.pool(2, placement_strategy="STRICT_SPREAD")
    begin(pool, cluster)
    cluster.silence(pool, "b")
    pool.place(avoid=NOBODY, without=NO_RANK)
    cluster.now = 10.0
    pool.look_at_the_clock()
    assert "the cluster has 0 CPU free on 1 node" in caplog.text


def late(cluster: FakeCluster) -> None:
    """Those that wait have their room, and start slowly."""
    cluster.starts_on = ("10.77.0.3",) * len(cluster.waiting)


def test_an_elastic_run_begins_with_those_too_that_start_slowly() -> None:
    """It would be restarted to grow as soon as they are there."""
    cluster = FakeCluster(a=2, b=1)
    pool = cluster.pool((1, 3))
    pool.place(avoid=NOBODY, without=NO_RANK)
    requested = list(cluster.waiting)
    cluster.arrive(pool, requested[0], "a")
    late(cluster)
    cluster.now = 10.0
    pool.look_at_the_clock()
    cluster.arrive(pool, requested[1], "a")
    late(cluster)
    cluster.now = 20.0
    pool.look_at_the_clock()
    assert cluster.sizes() == []
    cluster.arrive(pool, requested[2], "b")
    assert cluster.sizes() == [3]


def test_a_node_on_which_nothing_starts_does_not_hold_an_elastic_run_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster = FakeCluster(a=2, b=1)
    pool = cluster.pool((1, 3))
    pool.place(avoid=NOBODY, without=NO_RANK)
    for agent_handle in list(cluster.waiting)[:2]:
        cluster.arrive(pool, agent_handle, "a")
    late(cluster)
    while cluster.sizes() == []:
        assert pool.deadline is not None
        cluster.now = pool.deadline
        pool.look_at_the_clock()
    assert cluster.sizes() == [2]
    assert cluster.now == 60.0
    assert "1 of 3 have not started within 60 s, on 10.77.0.3" in caplog.text


def test_a_short_timeout_begins_an_elastic_run_with_those_that_are_there() -> None:
    cluster = FakeCluster(a=2)
    pool = cluster.pool((1, 2), start_timeout_s=25.0)
    pool.place(avoid=NOBODY, without=NO_RANK)
    cluster.arrive(pool, next(iter(cluster.waiting)), "a")
    late(cluster)
    while cluster.sizes() == []:
        assert pool.deadline is not None
        cluster.now = pool.deadline
        pool.look_at_the_clock()
    assert (cluster.now, cluster.failures()) == (25.0, [])


def test_a_run_is_restarted_once_for_all_that_are_starting() -> None:
    cluster = FakeCluster(a=1)
    pool = cluster.pool((1, 4))
    begin(pool, cluster)
    cluster.nodes["b"] = 3
    while cluster.waiting:
        assert cluster.growths() == []
        cluster.now += 5.0
        cluster.starts_on = ("10.77.0.3",) * (len(cluster.waiting) - 1)
        cluster.arrive(pool, next(iter(cluster.waiting)), "b")
    assert len(cluster.growths()) == 1
    pool.place(avoid=NOBODY, without=NO_RANK)
    assert cluster.sizes() == [1, 4]


def test_a_run_grows_without_those_that_never_start() -> None:
    cluster = FakeCluster(a=1)
    pool = cluster.pool((1, 3))
    begin(pool, cluster)
    cluster.nodes["b"] = 2
    late(cluster)
    cluster.arrive(pool, next(iter(cluster.waiting)), "b")
    assert cluster.growths() == []
    assert pool.deadline == 60.0
    cluster.now = 60.0
    pool.look_at_the_clock()
    assert len(cluster.growths()) == 1


REFUSED = Outlook(says="its autoscaler has no nodes to add that could hold them", refused=2)


def test_what_the_autoscaler_cannot_hold_fails_once_nobody_else_has_anything(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster = FakeCluster(a=1)
    cluster.says = REFUSED
    pool = cluster.pool(2, start_timeout_s=600.0)
    cluster.others["a"] = 1
    begin(pool, cluster)
    cluster.now = 10.0
    pool.look_at_the_clock()
    assert "Waiting for resources, up to 600 s: 2 workers" in caplog.text
    assert "has no nodes to add" in caplog.text
    assert cluster.failures() == []
    caplog.clear()
    # The other job has ended.
    del cluster.others["a"]
    cluster.now = pool.deadline or 0.0
    pool.look_at_the_clock()
    [reason] = cluster.failures()
    assert "waiting doesn't help" in reason
    assert caplog.text == ""


def test_a_run_does_not_fail_for_what_may_be_refused_to_another_job() -> None:
    """Of actors the autoscaler says only what they ask for; the other's may be gone by the next."""
    cluster = FakeCluster(a=1)
    cluster.says = doubtful = replace(REFUSED, is_certain=False)
    pool = cluster.pool(2, start_timeout_s=600.0)
    begin(pool, cluster)
    for says in (doubtful, replace(REFUSED, refused=0), doubtful):
        cluster.says = says
        cluster.now = pool.deadline or 0.0
        pool.look_at_the_clock()
        assert cluster.failures() == []
    # It stays so.
    cluster.now = pool.deadline or 0.0
    pool.look_at_the_clock()
    [reason] = cluster.failures()
    assert "waiting doesn't help" in reason


def test_what_the_autoscaler_says_meanwhile_is_said_too(caplog: pytest.LogCaptureFixture) -> None:
    cluster = FakeCluster(a=1)
    pool = cluster.pool(2, start_timeout_s=600.0)
    begin(pool, cluster)
    for says in ("it is starting nodes", "it has failed to start some", "it is starting nodes"):
        cluster.says = Outlook(says=says)
        cluster.now = pool.deadline or 0.0
        pool.look_at_the_clock()
    said = [record.getMessage() for record in caplog.records]
    assert [each.partition("1 node; ")[2] for each in said] == [
        "it is starting nodes.",
        "it has failed to start some.",
    ]


def test_a_run_of_a_fixed_size_says_where_its_room_is_lost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And, once the cluster knows of it, what it waits for then."""
    cluster = FakeCluster(a=1, b=1)
    cluster.says = Outlook(says="no autoscaler adds nodes to it")
    pool = cluster.pool(2)
    begin(pool, cluster)
    cluster.silence(pool, "b")
    pool.place(avoid=NOBODY, without=NO_RANK)
    cluster.settle(pool)
    cluster.now = pool.deadline or 0.0
    pool.look_at_the_clock()
    assert "2 workers of 1 CPU each, 1 of them ready; " in caplog.text
    assert "Room is still reserved on b, lost" in caplog.text
    caplog.clear()
    del cluster.nodes["b"]
    cluster.now = pool.deadline or 0.0
    pool.look_at_the_clock()
    assert "the cluster has 0 CPU free on 1 node" in caplog.text
    assert "lost" not in caplog.text


def test_an_elastic_run_starts_with_the_nodes_that_can_be_added() -> None:
    cluster = FakeCluster(a=1)
    cluster.says = replace(REFUSED, refused=1)
    pool = cluster.pool((1, 2))
    begin(pool, cluster)
    cluster.now = 10.0
    pool.look_at_the_clock()
    assert (cluster.sizes(), cluster.failures()) == ([1], [])


def test_a_run_that_has_trained_waits_for_its_nodes_to_come_back() -> None:
    cluster = FakeCluster(a=1, b=1)
    pool = cluster.pool(2)
    begin(pool, cluster)
    cluster.lose_node(pool, "b")
    cluster.says = REFUSED
    pool.place(avoid=NOBODY, without=NO_RANK)
    cluster.now = 10.0
    pool.look_at_the_clock()
    assert cluster.failures() == []


BLOCKED = FailedLink(source="a", target="b", reason="port 40000 doesn't answer within 1.5 s")


def test_nodes_are_tried_before_they_get_the_first_ranks() -> None:
    cluster = FakeCluster(a=1, b=1)
    pool = cluster.pool(2, tries_links=True)
    begin(pool, cluster)
    assert cluster.links_tried_of == [["a", "b"]]
    assert cluster.events == []
    pool.links_tried([])
    assert cluster.events == [AgentsPlaced(nodes=("a", "b"))]
    # The next attempt is on nodes that have been tried, or have shown that they can join.
    cluster.nodes["c"] = 1
    cluster.lose_node(pool, "b")
    pool.place(avoid=NOBODY, without=NO_RANK)
    cluster.settle(pool)
    assert cluster.sizes() == [2, 2]
    assert len(cluster.links_tried_of) == 1


def test_nodes_that_can_not_connect_get_no_ranks() -> None:
    cluster = FakeCluster(a=1, b=1)
    pool = cluster.pool(2, tries_links=True)
    begin(pool, cluster)
    pool.links_tried([BLOCKED])
    [reason] = cluster.failures()
    assert f"nodes can't connect to each other: {BLOCKED}. Let other nodes connect to b" in reason
    assert "RunConfig(preflight='off')" in reason
    assert cluster.sizes() == []


def test_a_node_that_takes_the_place_of_a_lost_one_is_tried_too() -> None:
    cluster = FakeCluster(a=1, b=1)
    pool = cluster.pool(2, tries_links=True)
    begin(pool, cluster)
    cluster.nodes["c"] = 1
    cluster.lose_node(pool, "b")
    cluster.settle(pool)
    pool.links_tried([])
    assert cluster.events == []
    assert cluster.links_tried_of == [["a", "b"], ["a", "c"]]
    pool.links_tried([])
    assert nodes(pool) == ["a", "c"]


@pytest.mark.parametrize(("cpus", "tries_links"), [({"a": 2}, True), ({"a": 1, "b": 1}, False)])
def test_one_node_or_no_preflight_tries_nothing(cpus: dict[str, int], tries_links: bool) -> None:
    cluster = FakeCluster(**cpus)
    begin(cluster.pool(2, tries_links=tries_links), cluster)
    assert cluster.sizes() == [2]
    assert cluster.links_tried_of == []
