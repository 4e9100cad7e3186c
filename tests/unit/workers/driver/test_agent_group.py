"""What a group does between its agents' events and its driver."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

from polytrain.events.attempt import Joined
from polytrain.workers.driver import agent_group
from polytrain.workers.driver.agent_group import AgentGroup


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """A cluster without agents, for a group without workers."""
    monkeypatch.setattr(AgentGroup, "_describe_agents", Mock())
    monkeypatch.setattr(AgentGroup, "_have_zygote_early", Mock(return_value=None))
    monkeypatch.setattr(agent_group, "WorkerJob", Mock())
    monkeypatch.setattr(agent_group, "WorkerPool", Mock(return_value=Mock(deadline=None)))
    return Mock()


def test_events_that_arrive_as_fast_as_they_are_handled_leave_time_for_others(
    cluster: Mock,
) -> None:
    """For a stop, a commit, and the pool's deadlines: all are looked at between two waits."""
    spec = Mock()
    spec.run.scaling_config.resources = {}
    group = AgentGroup(spec, cluster)
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
    pool = agent_group.WorkerPool(Mock())
    assert pool.look_at_the_clock.call_count == 2
