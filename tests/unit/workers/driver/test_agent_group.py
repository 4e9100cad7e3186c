"""What a group does between its agents' events and its driver."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

from polytrain.events.attempt import Joined
from polytrain.policy.placement import NodeAddress
from polytrain.workers.agents.agent_host import AgentHandle, Arrived
from polytrain.workers.agents.calls import FetchShared
from polytrain.workers.driver import agent_group
from polytrain.workers.driver.agent_group import AgentGroup
from polytrain.workers.driver.group import Mailbox


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """A cluster without agents, for a group without workers."""
    monkeypatch.setattr(AgentGroup, "_have_zygote_early", Mock(return_value=None))
    monkeypatch.setattr(agent_group, "WorkerJob", Mock())
    monkeypatch.setattr(agent_group, "WorkerPool", Mock(return_value=Mock(deadline=None)))
    return Mock()


def group_on(cluster: Mock) -> AgentGroup:
    run = Mock()
    run.scaling_config.resources = {}
    return AgentGroup(
        run=run,
        demand=Mock(),
        datasets=(),
        specs=(),
        agents=Mock(),
        cluster=cluster,
        mailbox=Mailbox(),
    )


def test_events_that_arrive_as_fast_as_they_are_handled_leave_time_for_others(
    cluster: Mock,
) -> None:
    """For deadlines, the pool's own among them: they are looked at between two waits."""
    group = group_on(cluster)
    pool = agent_group.WorkerPool(Mock())
    pool.deadline = 0.0
    group.place(avoid=frozenset(), without=frozenset())
    mailbox = cluster.launcher.call_args.args[3]
    event = Joined(attempt=0, rank=0)
    taken: list[Any] = []

    def handle(one: Any) -> None:
        taken.append(one)
        assert len(taken) < 10, "the wait doesn't end"
        mailbox.put([event])

    mailbox.put([event, event])
    mailbox.put([event])
    for count in (3, 6):
        group.wait(handle, None)
        assert len(taken) == count
    assert pool.look_at_the_clock.call_count == 2


def fetching(launcher: Mock) -> list[int]:
    """Return the numbers of the agents that were asked to fetch what all share, in order."""
    return [
        agent_handle.number
        for sent in launcher.call.call_args_list
        for agent_handle in sent.args[1]
        if isinstance(sent.args[0], FetchShared)
    ]


def test_standbys_fetch_what_all_ranks_share_before_one_gets_a_rank(
    cluster: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a loss, Ray may ask lost hosts for it, for 10 s each."""
    data = Mock(shared=(Mock(), Mock()))
    monkeypatch.setattr(AgentGroup, "_planner", Mock(return_value=data))
    group = group_on(cluster)
    pool, launcher = agent_group.WorkerPool(Mock()), cluster.launcher.return_value
    ranked, standby, later = (AgentHandle(number=number, bundle=None) for number in range(3))
    pool.agents.ranked, pool.agents.spares = [ranked], [standby]
    for _ in range(2):
        group.launch(Mock(members=[Mock()]))
    assert fetching(launcher) == [standby.number]
    pool.agents.spares = [standby, later]
    mailbox = cluster.launcher.call_args.args[3]
    mailbox.put([Arrived(agent_handle=later, place=NodeAddress(node_id="b", host="10.0.0.2"))])
    group.wait(Mock(), None)
    assert fetching(launcher) == [standby.number, later.number]
